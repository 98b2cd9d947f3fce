// What a node's part of a table is made for.
#pragma once

#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "parameters/update_rule.h"

namespace torchrelay::parameters {

enum class InitKind : std::uint32_t { kZeros, kConstant, kUniform, kNormal };
inline constexpr const char* kInitNames[] = {"zeros", "constant", "uniform", "normal"};

// The initial value of a key: a function of the key and the seed alone.
struct KeyInit {
  InitKind kind = InitKind::kZeros;
  double a = 0;
  double b = 0;
  std::uint64_t seed = 0;
};

struct StoreSpec {
  std::vector<std::uint32_t> lengths;  // one for all keys, or one per key
  std::uint64_t num_keys = 0;          // 0: keys are made at first use
  std::uint64_t capacity = 0;          // dynamic: rows this node can hold
  Dtype dtype = Dtype::kFloat32;
  UpdateRule rule;
  KeyInit init;
  std::uint32_t node = 0, num_nodes = 1, num_channels = 1;
};

// Throws kArgument for a table that cannot be, or that the host has no memory for.
void check(const StoreSpec& spec);

}  // namespace torchrelay::parameters
