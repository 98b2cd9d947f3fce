#include "torchrelay/parameters/element.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace torchrelay::parameters {
namespace {

float from_bfloat16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

std::uint16_t to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float from_float16(std::uint16_t bits) {
  const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16;
  const std::uint32_t rest = bits & 0x7fffu;
  if (rest >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  if (rest >= 0x400u) return std::bit_cast<float>(sign | ((rest << 13) + 0x38000000u));
  const float magnitude = static_cast<float>(rest) * 0x1p-24f;  // subnormal: a multiple of 2^-24
  return sign != 0 ? -magnitude : magnitude;
}

std::uint16_t to_float16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const auto with_sign = [sign](std::uint32_t rest) { return static_cast<std::uint16_t>(sign | rest); };
  if (magnitude > 0x7f800000u) return with_sign(0x7e00u);
  if (magnitude >= 0x477ff000u) return with_sign(0x7c00u);  // rounds to 65536 or more
  if (magnitude < 0x38800000u)                              // subnormal: let the float unit round
    return with_sign(static_cast<std::uint32_t>(std::lrintf(std::bit_cast<float>(magnitude) * 0x1p24f)));
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return with_sign((rounded - 0x38000000u) >> 13);
}

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

template <float (*kFrom)(std::uint16_t), std::uint16_t (*kTo)(float)>
void add_half(std::byte* to, const std::byte* from, std::size_t count) {
  auto* target = reinterpret_cast<std::uint16_t*>(to);
  const auto* source = reinterpret_cast<const std::uint16_t*>(from);
  for (std::size_t i = 0; i < count; ++i) target[i] = kTo(kFrom(target[i]) + kFrom(source[i]));
}

// Overflow of integers wraps, as in torch.
void add_int64(std::byte* to, const std::byte* from, std::size_t count) {
  add_as<std::uint64_t>(to, from, count);
}

double element_as_double(Element element, const std::byte* at) {
  const auto load = [at]<typename T>(T value) {
    std::memcpy(&value, at, sizeof value);
    return value;
  };
  switch (element) {
    case Element::kFloat32: return static_cast<double>(load(float{}));
    case Element::kFloat64: return load(double{});
    case Element::kFloat16: return static_cast<double>(from_float16(load(std::uint16_t{})));
    case Element::kBFloat16: return static_cast<double>(from_bfloat16(load(std::uint16_t{})));
    case Element::kInt64: return static_cast<double>(load(std::int64_t{}));
  }
  return 0;
}

}  // namespace

void add(Element element, std::byte* to, const std::byte* from, std::size_t count) {
  switch (element) {
    case Element::kFloat32:
#if defined(__x86_64__)
      if (has_avx2()) return add_float32_avx2(to, from, count);
#endif
      return add_float32(to, from, count);
    case Element::kFloat64: return add_as<double>(to, from, count);
    case Element::kFloat16: return add_half<from_float16, to_float16>(to, from, count);
    case Element::kBFloat16: return add_half<from_bfloat16, to_bfloat16>(to, from, count);
    case Element::kInt64: return add_int64(to, from, count);
  }
}

double squared_norm(Element element, const std::byte* values, std::size_t count) {
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double value = element_as_double(element, values + i * size_of(element));
    sum += value * value;
  }
  return sum;
}

void store_double(Element element, std::byte* to, double value) {
  const auto store = [to](auto result) { std::memcpy(to, &result, sizeof result); };
  switch (element) {
    case Element::kFloat32: return store(static_cast<float>(value));
    case Element::kFloat64: return store(value);
    case Element::kFloat16: return store(to_float16(static_cast<float>(value)));
    case Element::kBFloat16: return store(to_bfloat16(static_cast<float>(value)));
    case Element::kInt64: return store(static_cast<std::int64_t>(std::llround(value)));
  }
}

}  // namespace torchrelay::parameters
