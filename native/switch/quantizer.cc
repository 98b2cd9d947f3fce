#include "switch/quantizer.h"

#include <cmath>

namespace torchrelay::switchml {

std::int8_t block_exponent(const float* values, std::size_t count) {
  const auto field = static_cast<int>(kernels().max_magnitude(values, count) >> 23);
  const int exponent = field - 126;
  return exponent >= kNotQuantizable ? kNotQuantizable : static_cast<std::int8_t>(exponent);
}

double quantization_scale(std::int8_t exponent, std::uint32_t num_workers) {
  // A float32 below 2^e is at most (1 - 2^-24) * 2^e, which leaves 128 for the roundings of n <= 256 workers.
  const double roundings = num_workers <= 256 ? 0.0 : num_workers / 2.0;
  return std::ldexp((2147483647.0 - roundings) / num_workers, -exponent);
}

}  // namespace torchrelay::switchml
