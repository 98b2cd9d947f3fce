#include "core/mt19937.h"

#include <array>

#include "check.h"

using namespace torchrelay;

namespace {

using State = std::array<std::uint32_t, kTwisterWords>;

State seeded(std::uint32_t seed) {
  State state;
  state[0] = seed;
  for (std::uint32_t i = 1; i < kTwisterWords; ++i) {
    state[i] = 1812433253U * (state[i - 1] ^ state[i - 1] >> 30) + i;
  }
  return state;
}

State jumped(State state, std::uint64_t distance) {
  twister_jump(state, twister_polynomial(distance - 1));
  return state;
}

}  // namespace

TEST(first_words_are_those_of_the_reference) {
  // Temper the first word after seed 5489: the reference implementation gives 3499211612.
  State state = seeded(5489);
  twister_next(state);
  std::uint32_t y = state[0];
  y ^= y >> 11;
  y ^= y << 7 & 0x9d2c5680U;
  y ^= y << 15 & 0xefc60000U;
  y ^= y >> 18;
  CHECK(y == 3499211612U);
}

TEST(a_jump_equals_as_many_steps) {
  State walked = seeded(1);
  for (std::uint64_t blocks = 1; blocks <= 100; ++blocks) {
    twister_next(walked);
    CHECK(jumped(seeded(1), blocks * kTwisterWords) == walked);
  }
}

TEST(two_jumps_equal_one) {
  const std::uint64_t far = 3'000'000'001ULL;
  const std::uint64_t further = 77'777'777'777'777ULL;
  CHECK(jumped(jumped(seeded(2), far), further) == jumped(seeded(2), far + further));
}

TEST(the_period_comes_round) {
  // x^(2^19937 - 1) = 1: squaring x 19937 times gives x. Here: x^(2^k) by squaring equals x^(2^k) by
  // exponent.
  TwisterPolynomial power = twister_polynomial(1ULL << 40);
  CHECK(power == twister_polynomial((1ULL << 39) + (1ULL << 39)));
  CHECK(power != twister_polynomial((1ULL << 40) + 1));
}
