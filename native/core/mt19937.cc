#include "core/mt19937.h"

#include <algorithm>
#include <bit>
#include <vector>

namespace torchrelay {
namespace {

constexpr std::size_t kMiddle = 397;
constexpr std::uint32_t kTwist = 0x9908b0df;
constexpr std::uint32_t kUpper = 0x80000000;

// The exponents below the leading one of p, found by the Berlekamp-Massey algorithm from 40,000 output bits.
constexpr std::uint16_t kExponents[] = {
    0,     1189,  1416,  1585,  1643,  1870,  2493,  2773,  3000,  3227,  3454,  3681,  3908,  4135,  4362,
    4753,  5661,  6337,  6569,  7129,  7477,  7525,  7583,  7752,  7979,  8206,  9505,  9901,  9969,  10128,
    10693, 10761, 10920, 11089, 11147, 11157, 11215, 11321, 11374, 11384, 11485, 11611, 11712, 11717, 11838,
    11881, 11944, 11997, 12277, 12335, 12393, 12504, 12509, 12620, 12673, 12731, 12736, 12789, 12905, 12958,
    12963, 13137, 13185, 13190, 13243, 13301, 13412, 13528, 13533, 13639, 13697, 13760, 13813, 13866, 14093,
    14151, 14209, 14320, 14325, 14436, 14547, 14552, 14605, 14721, 14774, 14779, 14953, 15001, 15006, 15059,
    15117, 15228, 15344, 15349, 15455, 15513, 15576, 15629, 15682, 15909, 15967, 16025, 16136, 16141, 16252,
    16363, 16368, 16421, 16537, 16590, 16595, 16817, 16822, 16875, 16933, 17044, 17160, 17271, 17329, 17445,
    17498, 17725, 17783, 17841, 17952, 18068, 18179, 18237, 18406, 18633, 18691, 18860, 19087, 19314};

// The product of two remainders has fewer than this many 64-bit words.
constexpr std::size_t kSquareWords = 2 * kPolynomialWords;

std::uint32_t twisted(std::uint32_t first, std::uint32_t second, std::uint32_t middle) {
  const std::uint32_t mixed = (first & kUpper) | (second & ~kUpper);
  return middle ^ (mixed >> 1) ^ ((second & 1U) != 0 ? kTwist : 0U);
}

// Bit i of the lower half of value moves to bit 2i.
std::uint64_t spread(std::uint64_t value) {
  value &= 0xffffffffULL;
  value = (value | value << 16) & 0x0000ffff0000ffffULL;
  value = (value | value << 8) & 0x00ff00ff00ff00ffULL;
  value = (value | value << 4) & 0x0f0f0f0f0f0f0f0fULL;
  value = (value | value << 2) & 0x3333333333333333ULL;
  return (value | value << 1) & 0x5555555555555555ULL;
}

using Square = std::array<std::uint64_t, kSquareWords>;

void add_at(Square& sum, std::size_t bit, std::uint64_t chunk) {
  const std::size_t word = bit / 64;
  const std::size_t shift = bit % 64;
  sum[word] ^= chunk << shift;
  if (shift != 0) sum[word + 1] ^= chunk >> (64 - shift);
}

// chunk stands for terms from x^bit up, all of degree kTwisterBits or more: x^19937 = the sum of the others.
void fold(Square& sum, std::size_t bit, std::uint64_t chunk) {
  if (chunk == 0) return;
  for (const std::uint16_t exponent : kExponents) add_at(sum, bit - kTwisterBits + exponent, chunk);
}

TwisterPolynomial remainder(Square& value) {
  for (std::size_t word = kSquareWords; word-- > kPolynomialWords;) {
    const std::uint64_t chunk = value[word];
    value[word] = 0;
    fold(value, 64 * word, chunk);
  }
  constexpr std::size_t kept = kTwisterBits % 64;
  const std::uint64_t chunk = value[kPolynomialWords - 1] >> kept;
  value[kPolynomialWords - 1] ^= chunk << kept;
  fold(value, kTwisterBits, chunk);
  TwisterPolynomial result;
  std::copy_n(value.begin(), kPolynomialWords, result.begin());
  return result;
}

TwisterPolynomial squared(const TwisterPolynomial& value) {
  Square square;
  for (std::size_t word = 0; word < kPolynomialWords; ++word) {
    square[2 * word] = spread(value[word]);
    square[2 * word + 1] = spread(value[word] >> 32);
  }
  return remainder(square);
}

TwisterPolynomial times_x(const TwisterPolynomial& value) {
  Square product{};
  std::uint64_t carry = 0;
  for (std::size_t word = 0; word < kPolynomialWords; ++word) {
    product[word] = value[word] << 1 | carry;
    carry = value[word] >> 63;
  }
  return remainder(product);
}

}  // namespace

TwisterPolynomial twister_polynomial(std::uint64_t distance) {
  TwisterPolynomial power{};
  power[0] = 1;
  for (auto digit = static_cast<unsigned>(std::bit_width(distance)); digit-- > 0;) {
    power = squared(power);
    if ((distance >> digit & 1U) != 0) power = times_x(power);
  }
  return power;
}

void twister_next(std::span<std::uint32_t, kTwisterWords> state) {
  for (std::size_t i = 0; i < kTwisterWords; ++i) {
    const std::size_t middle = i + kMiddle < kTwisterWords ? i + kMiddle : i + kMiddle - kTwisterWords;
    state[i] = twisted(state[i], state[i + 1 == kTwisterWords ? 0 : i + 1], state[middle]);
  }
}

void twister_jump(std::span<std::uint32_t, kTwisterWords> state, const TwisterPolynomial& polynomial) {
  // The words from the second on: the lower bits of the first obey no recurrence.
  std::vector<std::uint32_t> words(kTwisterBits + kTwisterWords);
  std::copy(state.begin(), state.end(), words.begin());
  for (std::size_t i = kTwisterWords; i < words.size(); ++i) {
    const std::size_t base = i - kTwisterWords;
    words[i] = twisted(words[base], words[base + 1], words[base + kMiddle]);
  }
  constexpr std::size_t kBlock = 48;  // stays in vector registers; divides kTwisterWords
  static_assert(kTwisterWords % kBlock == 0);
  for (std::size_t start = 0; start < kTwisterWords; start += kBlock) {
    std::uint32_t sum[kBlock] = {};
    for (std::size_t word = 0; word < kPolynomialWords; ++word) {
      for (std::uint64_t left = polynomial[word]; left != 0; left &= left - 1) {
        const std::size_t exponent = 64 * word + static_cast<std::size_t>(std::countr_zero(left));
        const std::uint32_t* from = words.data() + 1 + exponent + start;
        for (std::size_t i = 0; i < kBlock; ++i) sum[i] ^= from[i];
      }
    }
    std::copy_n(sum, kBlock, state.begin() + static_cast<std::ptrdiff_t>(start));
  }
}

}  // namespace torchrelay
