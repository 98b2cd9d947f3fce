// The kernels, compiled once per instruction set: a source sets TORCHRELAY_ISA to the name of its namespace
// and includes this file. Plain loops that the compiler turns into vector code; a tile of accumulators stays
// in L1.
//
// Nothing here may call an inline function of the standard library: the linker would keep one copy of it for
// all instruction sets.
#pragma once

#include <cstring>
#include <type_traits>

#include "core/half.h"
#include "core/reduce_table.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

// Before a loop none of whose iterations depends on an earlier one, whatever its arrays share.
#if defined(__clang__)
#define TORCHRELAY_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define TORCHRELAY_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace torchrelay::TORCHRELAY_ISA {
namespace {

constexpr std::size_t kTile = 1024;

// How elements of T are accumulated: as they are, or as Values that load and store convert a run of.
template <class T>
struct Element {
  static constexpr bool kNative = true;
};

template <>
struct Element<Brain> {
  static constexpr bool kNative = false;
  using Value = float;
  static void load(float* out, const std::byte* in, std::size_t count) {
    const auto* values = reinterpret_cast<const Brain*>(in);
    for (std::size_t i = 0; i < count; ++i) out[i] = widen(values[i]);
  }
  static void store(std::byte* out, const float* in, std::size_t count) {
    auto* values = reinterpret_cast<Brain*>(out);
    for (std::size_t i = 0; i < count; ++i) values[i] = narrow_brain(in[i]);
  }
};

template <>
struct Element<Half> {
  static constexpr bool kNative = false;
  using Value = float;
  static void load(float* out, const std::byte* in, std::size_t count) {
    const auto* values = reinterpret_cast<const Half*>(in);
    std::size_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
      _mm256_storeu_ps(out + i,
                       _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values + i))));
#endif
    for (; i < count; ++i) out[i] = widen(values[i]);
  }
  static void store(std::byte* out, const float* in, std::size_t count) {
    auto* values = reinterpret_cast<Half*>(out);
    std::size_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(values + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < count; ++i) values[i] = narrow_half(in[i]);
  }
};

// Signed sums and products wrap, so they are done unsigned; a small type would be promoted to signed int.
template <class T>
using Wrapping = std::conditional_t<std::is_integral_v<T>,
                                    std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>, T>;

template <class V>
struct Sum {
  using W = Wrapping<V>;
  static V combine(V a, V b) { return static_cast<V>(static_cast<W>(a) + static_cast<W>(b)); }
};
template <class V>
struct Product {
  using W = Wrapping<V>;
  static V combine(V a, V b) { return static_cast<V>(static_cast<W>(a) * static_cast<W>(b)); }
};
template <class V>
struct Min {
  static V combine(V a, V b) { return (a < b || a != a) ? a : b; }
};
template <class V>
struct Max {
  static V combine(V a, V b) { return (a > b || a != a) ? a : b; }
};
template <class V>
struct And {
  static V combine(V a, V b) { return static_cast<V>(a & b); }
};
template <class V>
struct Or {
  static V combine(V a, V b) { return static_cast<V>(a | b); }
};
template <class V>
struct Xor {
  static V combine(V a, V b) { return static_cast<V>(a ^ b); }
};

// An array of T that may lie at any address.
template <class T>
struct Loose {
  typedef T Type __attribute__((aligned(1), may_alias));
};

// Elements that are their own accumulators need no conversion: two sources are combined as they lie, more of
// them in a tile that stays in L1.
template <class T, template <class> class Operation, bool average>
void run_native(const std::byte* const* sources, int count_sources, std::byte* out, std::size_t count) {
  using Array = typename Loose<T>::Type;
  alignas(64) T tile[kTile];
  // A narrow integer may not hold the number of sources.
  using Divisor = std::conditional_t<std::is_integral_v<T> && sizeof(T) < sizeof(int), int, T>;
  const auto divisor = static_cast<Divisor>(count_sources);
  for (std::size_t base = 0; base < count; base += kTile) {
    const std::size_t size = count - base < kTile ? count - base : kTile;
    const auto* total = reinterpret_cast<const Array*>(sources[0]) + base;
    for (int s = 1; s < count_sources; ++s) {
      const auto* next = reinterpret_cast<const Array*>(sources[s]) + base;
      auto* to = s + 1 < count_sources ? static_cast<Array*>(tile) : reinterpret_cast<Array*>(out) + base;
      // `to` is one of the others, or apart from both: no element depends on an earlier one.
      TORCHRELAY_INDEPENDENT
      for (std::size_t i = 0; i < size; ++i) to[i] = Operation<T>::combine(total[i], next[i]);
      total = to;
    }
    auto* to = reinterpret_cast<Array*>(out) + base;
    if constexpr (average) {
      TORCHRELAY_INDEPENDENT
      for (std::size_t i = 0; i < size; ++i) to[i] = static_cast<T>(total[i] / divisor);
    } else if (count_sources == 1) {
      TORCHRELAY_INDEPENDENT
      for (std::size_t i = 0; i < size; ++i) to[i] = total[i];
    }
  }
}

template <class T, template <class> class Operation, bool average>
void run_converted(const std::byte* const* sources, int count_sources, std::byte* out, std::size_t count) {
  using Value = typename Element<T>::Value;
  alignas(64) Value total[kTile];
  alignas(64) Value next[kTile];
  for (std::size_t base = 0; base < count; base += kTile) {
    const std::size_t size = count - base < kTile ? count - base : kTile;
    Element<T>::load(total, sources[0] + base * sizeof(T), size);
    for (int s = 1; s < count_sources; ++s) {
      Element<T>::load(next, sources[s] + base * sizeof(T), size);
      for (std::size_t i = 0; i < size; ++i) total[i] = Operation<Value>::combine(total[i], next[i]);
    }
    if constexpr (average) {
      const auto divisor = static_cast<Value>(count_sources);
      for (std::size_t i = 0; i < size; ++i) total[i] = static_cast<Value>(total[i] / divisor);
    }
    Element<T>::store(out + base * sizeof(T), total, size);
  }
}

template <class T, template <class> class Operation, bool average>
void run(const std::byte* const* sources, int count_sources, std::byte* out, std::size_t count) {
  if constexpr (Element<T>::kNative)
    run_native<T, Operation, average>(sources, count_sources, out, count);
  else
    run_converted<T, Operation, average>(sources, count_sources, out, count);
}

template <class T, template <class> class Operation>
Kernel plain() {
  return run<T, Operation, false>;
}

template <class T>
Kernel arithmetic(Op op) {
  switch (op) {
    case Op::kSum: return plain<T, Sum>();
    case Op::kAverage: return run<T, Sum, true>;
    case Op::kProduct: return plain<T, Product>();
    case Op::kMin: return plain<T, Min>();
    case Op::kMax: return plain<T, Max>();
    default: return nullptr;
  }
}

template <class T>
Kernel integral(Op op) {
  switch (op) {
    case Op::kAnd: return plain<T, And>();
    case Op::kOr: return plain<T, Or>();
    case Op::kXor: return plain<T, Xor>();
    default: return arithmetic<T>(op);
  }
}

}  // namespace

Kernel kernel(Dtype dtype, Op op) {
  switch (dtype) {
    case Dtype::kInt8: return integral<std::int8_t>(op);
    case Dtype::kUint8: return integral<std::uint8_t>(op);
    case Dtype::kInt16: return integral<std::int16_t>(op);
    case Dtype::kInt32: return integral<std::int32_t>(op);
    case Dtype::kInt64: return integral<std::int64_t>(op);
    case Dtype::kFloat16: return arithmetic<Half>(op);
    case Dtype::kBfloat16: return arithmetic<Brain>(op);
    case Dtype::kFloat32: return arithmetic<float>(op);
    case Dtype::kFloat64: return arithmetic<double>(op);
    default: return nullptr;
  }
}

}  // namespace torchrelay::TORCHRELAY_ISA
