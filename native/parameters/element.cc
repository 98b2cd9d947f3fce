#include "parameters/element.h"

#include <cmath>
#include <cstring>

#include "core/half.h"

namespace torchrelay::parameters {
namespace {

template <typename T>
inline __attribute__((always_inline)) void add_as(std::byte* to, const std::byte* from, std::size_t count) {
  T* __restrict target = reinterpret_cast<T*>(to);
  const T* __restrict source = reinterpret_cast<const T*>(from);
  for (std::size_t i = 0; i < count; ++i) target[i] = static_cast<T>(target[i] + source[i]);
}

void add_float32(std::byte* to, const std::byte* from, std::size_t count) { add_as<float>(to, from, count); }

#if defined(__x86_64__)
__attribute__((target("avx2"))) void add_float32_avx2(std::byte* to, const std::byte* from,
                                                      std::size_t count) {
  add_as<float>(to, from, count);
}

bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") != 0;
  return has;
}
#endif

template <typename T, T (*narrow)(float)>
void add_half(std::byte* to, const std::byte* from, std::size_t count) {
  auto* target = reinterpret_cast<T*>(to);
  const auto* source = reinterpret_cast<const T*>(from);
  for (std::size_t i = 0; i < count; ++i) target[i] = narrow(widen(target[i]) + widen(source[i]));
}

// Overflow of integers wraps, as in torch.
void add_int64(std::byte* to, const std::byte* from, std::size_t count) {
  add_as<std::uint64_t>(to, from, count);
}

double as_double(Dtype dtype, const std::byte* at) {
  const auto load = [at]<typename T>(T value) {
    std::memcpy(&value, at, sizeof value);
    return value;
  };
  switch (dtype) {
    case Dtype::kFloat32: return static_cast<double>(load(float{}));
    case Dtype::kFloat64: return load(double{});
    case Dtype::kFloat16: return static_cast<double>(widen(load(Half{})));
    case Dtype::kBfloat16: return static_cast<double>(widen(load(Brain{})));
    case Dtype::kInt64: return static_cast<double>(load(std::int64_t{}));
    default: return 0;  // no table's dtype
  }
}

}  // namespace

void add(Dtype dtype, std::byte* to, const std::byte* from, std::size_t count) {
  switch (dtype) {
    case Dtype::kFloat32:
#if defined(__x86_64__)
      if (has_avx2()) return add_float32_avx2(to, from, count);
#endif
      return add_float32(to, from, count);
    case Dtype::kFloat64: return add_as<double>(to, from, count);
    case Dtype::kFloat16: return add_half<Half, narrow_half>(to, from, count);
    case Dtype::kBfloat16: return add_half<Brain, narrow_brain>(to, from, count);
    case Dtype::kInt64: return add_int64(to, from, count);
    default: return;  // no table's dtype
  }
}

double squared_norm(Dtype dtype, const std::byte* values, std::size_t count) {
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double value = as_double(dtype, values + i * size_bytes(dtype));
    sum += value * value;
  }
  return sum;
}

void store_double(Dtype dtype, std::byte* to, double value) {
  const auto store = [to](auto result) { std::memcpy(to, &result, sizeof result); };
  switch (dtype) {
    case Dtype::kFloat32: return store(static_cast<float>(value));
    case Dtype::kFloat64: return store(value);
    case Dtype::kFloat16: return store(narrow_half(static_cast<float>(value)));
    case Dtype::kBfloat16: return store(narrow_brain(static_cast<float>(value)));
    case Dtype::kInt64: return store(static_cast<std::int64_t>(std::llround(value)));
    default: return;  // no table's dtype
  }
}

}  // namespace torchrelay::parameters
