// Block floating point: the values of a chunk share one exponent, and travel as int32.
//
// With e, an exponent that all workers agree on and 2^e > |x| for every value x of the chunk on all n
// workers, q = round(x * scale), scale = (2^31 - 1) / (n * 2^e), and the sum is (q1 + ... + qn) / scale. The
// integers cannot overflow. Each worker rounds by at most 1 / (2 * scale), so the error of a sum is at most
// n^2 * 2^e / 2^32 (plus one rounding of the result to float32).
//
// e is the IEEE exponent field of max|x| minus 126: -126 (zeros and subnormals) to 129. As the wire has 8
// signed bits, 127 means "not quantizable": a value on some worker is NaN, infinite, or at least 2^126. The
// maximum over the workers keeps it, so all of them learn it and sum that chunk exactly by other means.
#pragma once

#include <cstdint>

#include "switch/kernels.h"

namespace torchrelay::switchml {

inline constexpr std::int8_t kNotQuantizable = 127;
inline constexpr std::int8_t kSmallestExponent = -128;  // less than every chunk's: changes no maximum

// The exponent that a worker sends for its chunk.
std::int8_t block_exponent(const float* values, std::size_t count);

double quantization_scale(std::int8_t exponent, std::uint32_t num_workers);

}  // namespace torchrelay::switchml
