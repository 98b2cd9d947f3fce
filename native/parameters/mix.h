// A hash of 64 bits.
#pragma once

#include <cstdint>

namespace torchrelay::parameters {

// SplitMix64 (Steele, Lea, Flood 2014): every bit of the result depends on every bit of the argument.
constexpr std::uint64_t mix(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

}  // namespace torchrelay::parameters
