// Skipping draws of the Mersenne twister mt19937 without making them.
//
// The twister is linear over GF(2): with p its characteristic polynomial and g = x^d mod p, the word d places
// on is the sum (exclusive or) of those words whose places are the exponents of g. The method is that of
// H. Haramoto, M. Matsumoto, T. Nishimura, F. Panneton, P. L'Ecuyer, "Efficient jump ahead for F2-linear
// random number generators", INFORMS Journal on Computing 20(3), 2008.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace torchrelay {

inline constexpr std::size_t kTwisterWords = 624;     // the twister's state: this many 32-bit words
inline constexpr std::size_t kTwisterBits = 19937;    // of which this many bits matter
inline constexpr std::size_t kPolynomialWords = 312;  // coefficients of a remainder mod p, 64 to a word

// Bit i % 64 of word i / 64 is the coefficient of x^i.
using TwisterPolynomial = std::array<std::uint64_t, kPolynomialWords>;

// x^distance mod p. About 60 microseconds for each binary digit of distance.
TwisterPolynomial twister_polynomial(std::uint64_t distance);

// Replaces state by the one distance words further on; polynomial is twister_polynomial(distance - 1).
// All 32 bits of every word come out right, also those of the first, which do not influence any later word.
// distance must be at least 1. Takes about a millisecond, whatever the distance.
void twister_jump(std::span<std::uint32_t, kTwisterWords> state, const TwisterPolynomial& polynomial);

// Replaces state by the next one, kTwisterWords further on, as the generator itself does it.
void twister_next(std::span<std::uint32_t, kTwisterWords> state);

}  // namespace torchrelay
