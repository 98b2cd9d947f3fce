// The kernels, compiled once per instruction set: a source sets TORCHRELAY_ISA to the name of its namespace
// and includes this file. Plain loops that the compiler turns into vector code.
//
// Nothing here may call an inline function of the standard library: the linker would keep one copy of it for
// all instruction sets.
#include <cstring>

#include "switch/packet_kernel_table.h"

namespace torchrelay::switchml::TORCHRELAY_ISA {
namespace {

typedef std::uint32_t LooseWord __attribute__((aligned(1), may_alias));

// Adding 1.5 * 2^52 leaves a double's integer, rounded to nearest even, in the low bits of its mantissa.
constexpr double kRounder = 6755399441055744.0;

void load(std::int32_t* __restrict out, const std::byte* __restrict payload, std::size_t count) {
  const LooseWord* words = reinterpret_cast<const LooseWord*>(payload);
  for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<std::int32_t>(__builtin_bswap32(words[i]));
}

void store(std::byte* __restrict payload, const std::int32_t* __restrict values, std::size_t count) {
  LooseWord* words = reinterpret_cast<LooseWord*>(payload);
  for (std::size_t i = 0; i < count; ++i) words[i] = __builtin_bswap32(static_cast<std::uint32_t>(values[i]));
}

void add(std::int32_t* __restrict sum, const std::byte* __restrict payload, std::size_t count) {
  const LooseWord* words = reinterpret_cast<const LooseWord*>(payload);
  for (std::size_t i = 0; i < count; ++i)
    sum[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(sum[i]) + __builtin_bswap32(words[i]));
}

std::uint32_t max_magnitude(const float* values, std::size_t count) {
  const LooseWord* words = reinterpret_cast<const LooseWord*>(values);
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t magnitude = words[i] & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

void quantize(std::byte* __restrict payload, const float* __restrict values, std::size_t count,
              double scale) {
  LooseWord* words = reinterpret_cast<LooseWord*>(payload);
  for (std::size_t i = 0; i < count; ++i) {
    const double rounded = static_cast<double>(values[i]) * scale + kRounder;
    std::uint64_t bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    words[i] = __builtin_bswap32(static_cast<std::uint32_t>(bits));
  }
}

void dequantize(float* __restrict values, const std::byte* __restrict payload, std::size_t count,
                double step) {
  const LooseWord* words = reinterpret_cast<const LooseWord*>(payload);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = static_cast<float>(
        static_cast<double>(static_cast<std::int32_t>(__builtin_bswap32(words[i]))) * step);
}

}  // namespace

const Kernels kKernels = {load, store, add, max_magnitude, quantize, dequantize};

}  // namespace torchrelay::switchml::TORCHRELAY_ISA
