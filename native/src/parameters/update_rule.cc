#include "torchrelay/parameters/update_rule.h"

#include <cmath>

namespace torchrelay::parameters {
namespace {

template <typename T>
struct Row {
  const UpdateRule& rule;
  T* __restrict value;
  const T* __restrict pushed;
  std::size_t length;
  T* state = value + length;
  T lr = static_cast<T>(rule.learning_rate);
  T eps = static_cast<T>(rule.eps);

  T gradient(std::size_t i) const { return pushed[i] + static_cast<T>(rule.weight_decay) * value[i]; }

  void sgd() const {
    for (std::size_t i = 0; i < length; ++i) value[i] -= lr * gradient(i);
  }

  void adagrad() const {
    for (std::size_t i = 0; i < length; ++i) {
      const T g = gradient(i);
      state[i] += g * g;
      value[i] -= lr * g / (std::sqrt(state[i]) + eps);
    }
  }

  void rowwise_adagrad() const {
    T sum = 0;
    for (std::size_t i = 0; i < length; ++i) sum += gradient(i) * gradient(i);
    state[0] += sum / static_cast<T>(length);
    const T step = lr / (std::sqrt(state[0]) + eps);
    for (std::size_t i = 0; i < length; ++i) value[i] -= step * gradient(i);
  }

  void adam() const {
    T* first = state;
    T* second = state + length;
    T& steps = state[2 * length];
    const T beta1 = static_cast<T>(rule.beta1), beta2 = static_cast<T>(rule.beta2);
    steps = rule.step > 0 ? static_cast<T>(rule.step) : steps + 1;
    const T correction1 = 1 - std::pow(beta1, steps);
    const T correction2 = std::sqrt(1 - std::pow(beta2, steps));
    const T margin = rule.step > 0 ? eps / correction2 : eps;  // SparseAdam adds it before the correction
    for (std::size_t i = 0; i < length; ++i) {
      const T g = gradient(i);
      first[i] = beta1 * first[i] + (1 - beta1) * g;
      second[i] = beta2 * second[i] + (1 - beta2) * g * g;
      value[i] -= lr / correction1 * first[i] / (std::sqrt(second[i]) / correction2 + margin);
    }
  }

  void apply() const {
    switch (rule.kind) {
      case RuleKind::kSgd: return sgd();
      case RuleKind::kAdagrad: return adagrad();
      case RuleKind::kRowwiseAdagrad: return rowwise_adagrad();
      case RuleKind::kAdam: return adam();
      case RuleKind::kAdd: return;
    }
  }
};

}  // namespace

std::size_t UpdateRule::state_length(std::size_t length) const {
  switch (kind) {
    case RuleKind::kAdagrad: return length;
    case RuleKind::kRowwiseAdagrad: return 1;
    case RuleKind::kAdam: return 2 * length + 1;
    default: return 0;
  }
}

bool UpdateRule::allows(Dtype dtype) const {
  return kind == RuleKind::kAdd || dtype == Dtype::kFloat32 || dtype == Dtype::kFloat64;
}

void UpdateRule::initialize_state(Dtype dtype, std::byte* state, std::size_t length) const {
  const bool accumulates = kind == RuleKind::kAdagrad || kind == RuleKind::kRowwiseAdagrad;
  for (std::size_t i = 0; i < state_length(length); ++i)
    store_double(dtype, state + i * size_bytes(dtype), accumulates ? initial_accumulator : 0.0);
}

void UpdateRule::apply(Dtype dtype, std::byte* row, const std::byte* pushed, std::size_t length) const {
  if (kind == RuleKind::kAdd) return add(dtype, row, pushed, length);
  if (dtype == Dtype::kFloat64)
    return Row<double>{*this, reinterpret_cast<double*>(row), reinterpret_cast<const double*>(pushed), length}
        .apply();
  Row<float>{*this, reinterpret_cast<float*>(row), reinterpret_cast<const float*>(pushed), length}.apply();
}

}  // namespace torchrelay::parameters
