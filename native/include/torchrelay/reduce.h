// Element-wise reductions of several arrays into one.
//
// The sources are combined in the order given, so the result does not depend on who computes it, nor on the
// instruction set, nor on how an array was cut in pieces. float16 and bfloat16 are added up in float32 and
// rounded once, to nearest even. Integers wrap around. MIN and MAX of a NaN is a NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torchrelay {

enum class Dtype : std::uint8_t {
  kInt8,
  kUint8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat64,
};

enum class Op : std::uint8_t { kSum, kAverage, kProduct, kMin, kMax, kAnd, kOr, kXor };

std::size_t size_bytes(Dtype dtype) noexcept;
const char* name(Dtype dtype) noexcept;
const char* name(Op op) noexcept;

// A kernel: out[i] = sources[0][i] op ... op sources[count_sources - 1][i], for `count` elements. kAverage
// divides the sum by count_sources (integers: the wrapped sum, towards zero). `out` may be one of the
// sources.
using Kernel = void (*)(const std::byte* const* sources, int count_sources, std::byte* out,
                        std::size_t count);

// The kernel for this machine's best instruction set. Throws kArgument for AND, OR, XOR of floating point.
Kernel find_kernel(Dtype dtype, Op op);

// The same for a named instruction set, one of instruction_sets(); for tests and benchmarks.
Kernel find_kernel(Dtype dtype, Op op, const std::string& instruction_set);

// Those this machine has, the best first: "avx512", "avx2", "baseline".
std::vector<std::string> instruction_sets();

}  // namespace torchrelay
