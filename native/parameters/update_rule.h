// What a push does to a row: add it, or take it as a gradient and make an optimizer's step.
//
// A row is its value, then the optimizer's state, of the table's element type; under half-precision values
// the state is float32, in which the step is computed, so each of its numbers takes the place of two
// elements:
//   add, sgd          value
//   adagrad           value, sum of squared gradients (length)
//   rowwise_adagrad   value, sum of mean squared gradients (1)
//   adam              value, first moment (length), second moment (length), steps (1)
// The formulas are torch.optim's, per row. Adam counts each row's own steps; where the caller counts the
// steps of the whole table (`step`), it is SparseAdam.
#pragma once

#include <cstddef>
#include <cstdint>

#include "parameters/element.h"

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

  // The state beside a value of `length` elements, in elements of `dtype`.
  std::size_t state_length(Dtype dtype, std::size_t length) const;

  // Optimizers are defined for floating-point types; add for every dtype.
  bool allows(Dtype dtype) const;

  // A new row's optimizer state.
  void initialize_state(Dtype dtype, std::byte* state, std::size_t length) const;

  // One push of `length` elements onto the row.
  void apply(Dtype dtype, std::byte* row, const std::byte* pushed, std::size_t length) const;

 private:
  std::size_t num_state(std::size_t length) const;  // its numbers
  template <typename Half, Half (*narrow)(float)>
  void apply_half(std::byte* row, const std::byte* pushed, std::size_t length) const;
};

}  // namespace torchrelay::parameters
