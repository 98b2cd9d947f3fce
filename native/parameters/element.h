// The element types of a table, and operations on rows of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace torchrelay::parameters {

inline constexpr Dtype kTableDtypes[] = {Dtype::kFloat32, Dtype::kFloat64, Dtype::kFloat16, Dtype::kBfloat16,
                                         Dtype::kInt64};
constexpr bool is_table_dtype(Dtype dtype) {
  return std::ranges::find(kTableDtypes, dtype) != std::end(kTableDtypes);
}

// to += from, elementwise; half types round to nearest even. The ranges do not overlap.
void add(Dtype dtype, std::byte* to, const std::byte* from, std::size_t count);

// The square of the l2 norm, in double.
double squared_norm(Dtype dtype, const std::byte* values, std::size_t count);

// value as `dtype`, written to `to`; integers are rounded.
void store_double(Dtype dtype, std::byte* to, double value);

}  // namespace torchrelay::parameters
