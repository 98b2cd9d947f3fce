// The encodings, compiled once per instruction set, beside the reductions and by their rules.
#pragma once

#include "core/compression_table.h"
#include "core/reduce_kernels.h"

namespace torchrelay::TORCHRELAY_ISA {
namespace {

constexpr std::size_t kRun = Codec::kRun;
constexpr std::size_t kStepBytes = sizeof(float);
constexpr std::int32_t kInfinity = 0x7F800000;
constexpr std::uint32_t kNan = 0x7FC00000u;
constexpr std::int32_t kNotFinite = -128;
constexpr float kLeastStep = 0x1p-126f;
constexpr float kMostStep = 0x1.020406p+121f;  // 127 of the next would overflow
// Adding 1.5 * 2^23 leaves a float's integer, rounded to nearest even, in the low bits of its mantissa.
constexpr float kRounder = 12582912.0f;

std::int32_t magnitude(float value) { return static_cast<std::int32_t>(as_bits(value) & 0x7FFFFFFFu); }
bool is_finite(float value) { return magnitude(value) < kInfinity; }

// Of two words, without a branch, around which compilers do not vectorize floating-point operations.
std::uint32_t select(bool first, std::uint32_t a, std::uint32_t b) {
  const std::uint32_t mask = first ? ~0u : 0u;
  return (a & mask) | (b & ~mask);
}

// Elements as float32.
template <class T>
struct Values : Element<T> {};

template <>
struct Values<float> {
  static void load(float* out, const std::byte* in, std::size_t count) {
    std::memcpy(out, in, count * sizeof *out);
  }
  static void store(std::byte* out, const float* in, std::size_t count) {
    std::memcpy(out, in, count * sizeof *in);
  }
};

template <class Function>
void for_each_run(std::size_t count, Function function) {
  for (std::size_t base = 0; base < count; base += kRun)
    function(base, count - base < kRun ? count - base : kRun);
}

float step_of(const float* values, std::size_t count) {
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::int32_t finite = is_finite(values[i]) ? magnitude(values[i]) : 0;
    largest = finite > largest ? finite : largest;
  }
  const float step = as_float(static_cast<std::uint32_t>(largest)) / 127.0f;
  return step < kLeastStep ? kLeastStep : step > kMostStep ? kMostStep : step;
}

// `values` over their step, rounded.
void quantize(std::int32_t* __restrict codes, const float* __restrict values, std::size_t count, float step) {
  const float scale = 1.0f / step;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t rounded = as_bits(values[i] * scale + kRounder) - as_bits(kRounder);
    codes[i] = static_cast<std::int32_t>(
        select(is_finite(values[i]), rounded, static_cast<std::uint32_t>(kNotFinite)));
  }
}

void subtract(float* __restrict lost, const float* __restrict values, const std::int32_t* __restrict codes,
              std::size_t count, float step) {
  for (std::size_t i = 0; i < count; ++i) {
    const float left = values[i] - static_cast<float>(codes[i]) * step;
    lost[i] = as_float(select(codes[i] != kNotFinite, as_bits(left), 0u));
  }
}

template <class T>
void encode_int8(const std::byte* elements, std::size_t count, std::byte* out, float* lost) {
  for_each_run(count, [&](std::size_t base, std::size_t size) {
    alignas(64) float values[kRun];
    alignas(64) std::int32_t codes[kRun];
    alignas(64) std::int8_t narrow[kRun];
    Values<T>::load(values, elements + base * sizeof(T), size);
    const float step = step_of(values, size);
    quantize(codes, values, size, step);
    for (std::size_t i = 0; i < size; ++i) narrow[i] = static_cast<std::int8_t>(codes[i]);
    std::memcpy(out, &step, kStepBytes);
    std::memcpy(out + kStepBytes, narrow, size);
    out += kStepBytes + size;
    if (lost != nullptr) subtract(lost + base, values, codes, size, step);
  });
}

template <class T>
void decode_int8(const std::byte* encoded, std::size_t count, std::byte* out) {
  for_each_run(count, [&](std::size_t base, std::size_t size) {
    alignas(64) float values[kRun];
    float step;
    std::memcpy(&step, encoded, kStepBytes);
    const auto* codes = reinterpret_cast<const std::int8_t*>(encoded + kStepBytes);
    for (std::size_t i = 0; i < size; ++i) {
      const float value = static_cast<float>(codes[i]) * step;
      values[i] = as_float(select(codes[i] != kNotFinite, as_bits(value), kNan));
    }
    Values<T>::store(out + base * sizeof(T), values, size);
    encoded += kStepBytes + size;
  });
}

std::size_t int8_bytes(std::size_t count) { return count + (count + kRun - 1) / kRun * kStepBytes; }

void subtract(float* __restrict lost, const float* __restrict values, const float* __restrict rounded,
              std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const float left = values[i] - rounded[i];
    lost[i] = as_float(select(is_finite(rounded[i]), as_bits(left), 0u));
  }
}

void encode_brain(const std::byte* elements, std::size_t count, std::byte* out, float* lost) {
  for_each_run(count, [&](std::size_t base, std::size_t size) {
    alignas(64) float values[kRun], rounded[kRun];
    std::byte* to = out + base * sizeof(Brain);
    Values<float>::load(values, elements + base * sizeof(float), size);
    Values<Brain>::store(to, values, size);
    if (lost == nullptr) return;
    Values<Brain>::load(rounded, to, size);
    subtract(lost + base, values, rounded, size);
  });
}

void decode_brain(const std::byte* encoded, std::size_t count, std::byte* out) {
  for_each_run(count, [&](std::size_t base, std::size_t size) {
    alignas(64) float values[kRun];
    Values<Brain>::load(values, encoded + base * sizeof(Brain), size);
    Values<float>::store(out + base * sizeof(float), values, size);
  });
}

std::size_t brain_bytes(std::size_t count) { return count * sizeof(Brain); }

template <class T>
constexpr Codec kInt8Codec = {encode_int8<T>, decode_int8<T>, int8_bytes};
constexpr Codec kBrainCodec = {encode_brain, decode_brain, brain_bytes};

}  // namespace

const Codec* codec(Compression compression, Dtype dtype) {
  if (compression == Compression::kBfloat16) return dtype == Dtype::kFloat32 ? &kBrainCodec : nullptr;
  if (compression != Compression::kInt8) return nullptr;
  switch (dtype) {
    case Dtype::kFloat32: return &kInt8Codec<float>;
    case Dtype::kFloat16: return &kInt8Codec<Half>;
    case Dtype::kBfloat16: return &kInt8Codec<Brain>;
    default: return nullptr;
  }
}

}  // namespace torchrelay::TORCHRELAY_ISA
