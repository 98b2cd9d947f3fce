#include "parameters/update_rule.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "core/half.h"

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

bool is_half(Dtype dtype) { return dtype == Dtype::kFloat16 || dtype == Dtype::kBfloat16; }

Dtype state_dtype(Dtype dtype) { return is_half(dtype) ? Dtype::kFloat32 : dtype; }

}  // namespace

std::size_t UpdateRule::num_state(std::size_t length) const {
  switch (kind) {
    case RuleKind::kAdagrad: return length;
    case RuleKind::kRowwiseAdagrad: return 1;
    case RuleKind::kAdam: return 2 * length + 1;
    default: return 0;
  }
}

std::size_t UpdateRule::state_length(Dtype dtype, std::size_t length) const {
  return num_state(length) * size_bytes(state_dtype(dtype)) / size_bytes(dtype);
}

bool UpdateRule::allows(Dtype dtype) const { return kind == RuleKind::kAdd || dtype != Dtype::kInt64; }

void UpdateRule::initialize_state(Dtype dtype, std::byte* state, std::size_t length) const {
  const bool accumulates = kind == RuleKind::kAdagrad || kind == RuleKind::kRowwiseAdagrad;
  const Dtype element = state_dtype(dtype);
  for (std::size_t i = 0; i < num_state(length); ++i)
    store_double(element, state + i * size_bytes(element), accumulates ? initial_accumulator : 0.0);
}

template <typename T, T (*narrow)(float)>
void UpdateRule::apply_half(std::byte* row, const std::byte* pushed, std::size_t length) const {
  const std::size_t state_bytes = num_state(length) * sizeof(float);
  thread_local std::vector<float> wide;  // value, state, gradient
  wide.resize(2 * length + num_state(length));
  float* const value = wide.data();
  float* const gradient = value + wide.size() - length;
  auto* const stored = reinterpret_cast<T*>(row);
  const auto* const given = reinterpret_cast<const T*>(pushed);
  std::byte* const state = row + length * sizeof(T);  // may not be aligned
  for (std::size_t i = 0; i < length; ++i) value[i] = widen(stored[i]);
  for (std::size_t i = 0; i < length; ++i) gradient[i] = widen(given[i]);
  std::memcpy(value + length, state, state_bytes);
  Row<float>{*this, value, gradient, length}.apply();
  for (std::size_t i = 0; i < length; ++i) stored[i] = narrow(value[i]);
  std::memcpy(state, value + length, state_bytes);
}

void UpdateRule::apply(Dtype dtype, std::byte* row, const std::byte* pushed, std::size_t length) const {
  if (kind == RuleKind::kAdd) return add(dtype, row, pushed, length);
  if (dtype == Dtype::kFloat16) return apply_half<Half, narrow_half>(row, pushed, length);
  if (dtype == Dtype::kBfloat16) return apply_half<Brain, narrow_brain>(row, pushed, length);
  if (dtype == Dtype::kFloat64)
    return Row<double>{*this, reinterpret_cast<double*>(row), reinterpret_cast<const double*>(pushed), length}
        .apply();
  Row<float>{*this, reinterpret_cast<float*>(row), reinterpret_cast<const float*>(pushed), length}.apply();
}

}  // namespace torchrelay::parameters
