// float16 and bfloat16 to float32 and back, rounding to nearest even.
//
// In an unnamed namespace, and without the standard library's inline functions: sources that are compiled for
// several instruction sets include this, and the linker would keep one copy for all of them.
#pragma once

#include <cstdint>
#include <cstring>

namespace torchrelay {
namespace {

struct Half {
  std::uint16_t bits;
};
struct Brain {
  std::uint16_t bits;
};

inline float as_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline std::uint32_t as_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float widen(Brain value) { return as_float(static_cast<std::uint32_t>(value.bits) << 16); }

inline Brain narrow_brain(float value) {
  const std::uint32_t bits = as_bits(value);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<std::uint16_t>(value != value ? 0x7FC0u | (bits >> 16) : rounded)};
}

// IEEE 754 binary16: subnormals are scaled up by a power of two that float32 holds exactly.
inline float widen(Half value) {
  const std::uint32_t sign = (value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = value.bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return as_float(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  return as_float(sign | as_bits(as_float(magnitude << 13) * 0x1p112f));
}

inline Half narrow_half(float value) {
  const std::uint32_t bits = as_bits(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  std::uint32_t half;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u | ((magnitude >> 13) & 0x3FFu);
  } else if (magnitude >= 0x477FF000u) {  // rounds to 65536 or is past it
    half = 0x7C00u;
  } else if (magnitude >= 0x38800000u) {  // normal
    half = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  } else {  // subnormal: adding 0.5 leaves the rounded bits at the bottom of the sum
    half = as_bits(as_float(magnitude) + 0.5f) - 0x3F000000u;
  }
  return {static_cast<std::uint16_t>(sign | half)};
}

}  // namespace
}  // namespace torchrelay
