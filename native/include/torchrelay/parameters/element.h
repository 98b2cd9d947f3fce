// The element types of a table, and what is done to rows of them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torchrelay::parameters {

enum class Element : std::uint32_t { kFloat32, kFloat64, kFloat16, kBFloat16, kInt64 };

constexpr std::size_t size_of(Element element) {
  switch (element) {
    case Element::kFloat16:
    case Element::kBFloat16: return 2;
    case Element::kFloat32: return 4;
    default: return 8;
  }
}

// to += from, elementwise; half types round to nearest even. The ranges do not overlap.
void add(Element element, std::byte* to, const std::byte* from, std::size_t count);

// The square of the l2 norm, in double.
double squared_norm(Element element, const std::byte* values, std::size_t count);

// value as `element`, written to `to`; integers are rounded.
void store_double(Element element, std::byte* to, double value);

}  // namespace torchrelay::parameters
