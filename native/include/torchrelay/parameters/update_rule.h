// What a push does to a row: add it, or take it as a gradient and make an optimizer's step.
//
// A row is its value, then the optimizer's state, all of one element type:
//   add, sgd          value
//   adagrad           value, sum of squared gradients (length)
//   rowwise_adagrad   value, sum of mean squared gradients (1)
//   adam              value, first moment (length), second moment (length), steps (1)
// The formulas are torch.optim's, per row. Adam counts each row's own steps; where the caller counts the
// steps of the whole table (`step`), it is SparseAdam.
#pragma once

#include <cstddef>
#include <cstdint>

#include "torchrelay/parameters/element.h"

namespace torchrelay::parameters {

enum class RuleKind : std::uint32_t { kAdd, kSgd, kAdagrad, kRowwiseAdagrad, kAdam };
inline constexpr const char* kRuleNames[] = {"add", "sgd", "adagrad", "rowwise_adagrad", "adam"};

struct UpdateRule {
  RuleKind kind = RuleKind::kAdd;
  double learning_rate = 1;
  double eps = 1e-10;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double weight_decay = 0;
  double initial_accumulator = 0;
  double step = 0;  // of the table, from 1; 0: Adam counts each row's own

  std::size_t state_length(std::size_t length) const;

  // Optimizers are defined for float32 and float64; add for every dtype.
  bool allows(Dtype dtype) const;

  // A new row's optimizer state.
  void initialize_state(Dtype dtype, std::byte* state, std::size_t length) const;

  // One push of `length` elements onto the row.
  void apply(Dtype dtype, std::byte* row, const std::byte* pushed, std::size_t length) const;
};

}  // namespace torchrelay::parameters
