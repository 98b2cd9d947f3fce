// The loops over a packet's payload, compiled for several instruction sets and chosen at run time.
//
// All instruction sets give the same bits. Payloads may lie at any address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace torchrelay::switchml {

struct Kernels {
  // Big-endian payload to integers and back.
  void (*load)(std::int32_t* out, const std::byte* payload, std::size_t count);
  void (*store)(std::byte* payload, const std::int32_t* values, std::size_t count);
  // sum[i] += payload[i]; wraps around.
  void (*add)(std::int32_t* sum, const std::byte* payload, std::size_t count);
  // The largest absolute value, as the bits of its float32. NaN and Inf are larger than every number.
  std::uint32_t (*max_magnitude)(const float* values, std::size_t count);
  // payload[i] = values[i] * scale, rounded to nearest even. The products must fit into int32.
  void (*quantize)(std::byte* payload, const float* values, std::size_t count, double scale);
  // values[i] = payload[i] * step, rounded once.
  void (*dequantize)(float* values, const std::byte* payload, std::size_t count, double step);
};

// The fastest that this machine can run.
const Kernels& kernels();

// Those of one instruction set, "baseline" or "avx2", for tests. Throws kArgument where it is missing.
const Kernels& kernels(const std::string& instruction_set);

}  // namespace torchrelay::switchml
