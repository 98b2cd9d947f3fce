// Element-wise reductions of several arrays into one.
//
// The sources are combined in the order given, so the result does not depend on who computes it, nor on the
// instruction set, nor on how an array was cut in pieces. float16 and bfloat16 are added up in float32 and
// rounded once, to nearest even. Integers wrap around. MIN and MAX of a NaN is a NaN. bool is reduced as
// logic: SUM and MAX are or, PRODUCT and MIN are and. Complex numbers are added as pairs, and have no other
// reductions. PREMUL_SUM is the sum of what was multiplied before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace torchrelay {

enum class Op : std::uint8_t { kSum, kAverage, kProduct, kMin, kMax, kAnd, kOr, kXor, kPremulSum };

// By Op; c10d's names.
inline constexpr const char* kOpNames[] = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                           "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
inline constexpr int kNumOps = static_cast<int>(std::size(kOpNames));

constexpr const char* name(Op op) noexcept { return kOpNames[static_cast<int>(op)]; }

// A kernel: out[i] = sources[0][i] op ... op sources[count_sources - 1][i], for `count` elements. kAverage
// divides the sum by count_sources (integers: the wrapped sum, towards zero). `out` may be one of the
// sources.
using Kernel = void (*)(const std::byte* const* sources, int count_sources, std::byte* out,
                        std::size_t count);

bool reduces(Dtype dtype, Op op) noexcept;

// The kernel for this machine's best instruction set. Throws kArgument unless it reduces that.
Kernel find_kernel(Dtype dtype, Op op);

// The same for a named instruction set, one of instruction_sets(); for tests and benchmarks.
Kernel find_kernel(Dtype dtype, Op op, const std::string& instruction_set);

// Divides elements in place; integers round towards zero.
void divide(Dtype dtype, std::byte* data, std::size_t count, int divisor);

// Those this machine has, the best first: "avx512", "avx2", "baseline".
std::vector<std::string> instruction_sets();

}  // namespace torchrelay
