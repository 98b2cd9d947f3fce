#include "core/reduce.h"

#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "core/error.h"
#include "core/half.h"
#include "core/reduce_table.h"

namespace torchrelay {
namespace {

using Find = Kernel (*)(Dtype, Op);

#if defined(__x86_64__)
bool has_f16c() {  // older Clangs do not know this feature by name
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

std::vector<std::pair<std::string, Find>> available() {
  std::vector<std::pair<std::string, Find>> found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    found.emplace_back("avx512", avx512::kernel);
  if (__builtin_cpu_supports("avx2") && has_f16c()) found.emplace_back("avx2", avx2::kernel);
#endif
  found.emplace_back("baseline", baseline::kernel);
  return found;
}

constexpr Op as_logic(Op op) {
  switch (op) {
    case Op::kSum:
    case Op::kMax:
    case Op::kOr: return Op::kOr;
    case Op::kProduct:
    case Op::kMin:
    case Op::kAnd: return Op::kAnd;
    default: return op;  // of which a byte has XOR, and a bool no others
  }
}

template <Dtype part, Op op>
void add_pairs(const std::byte* const* sources, int count_sources, std::byte* out, std::size_t count) {
  find_kernel(part, op)(sources, count_sources, out, 2 * count);
}

template <Dtype part>
Kernel pairs(Op op) {
  return op == Op::kSum       ? add_pairs<part, Op::kSum>
         : op == Op::kAverage ? add_pairs<part, Op::kAverage>
                              : nullptr;
}

// Null where it is not defined.
Kernel found(Find find, Dtype dtype, Op op) {
  if (op == Op::kPremulSum) op = Op::kSum;
  if (dtype == Dtype::kBool) return op == Op::kAverage ? nullptr : find(Dtype::kUint8, as_logic(op));
  if (dtype == Dtype::kComplex64) return pairs<Dtype::kFloat32>(op);
  if (dtype == Dtype::kComplex128) return pairs<Dtype::kFloat64>(op);
  return find(dtype, op);
}

Find best() {
  static const Find first = available().front().second;
  return first;
}

Kernel checked(Kernel kernel, Dtype dtype, Op op) {
  if (kernel == nullptr)
    throw Error(Code::kArgument, std::string("reduction: ") + name(op) + " of " + name(dtype) +
                                     " is not defined or not supported");
  return kernel;
}

// Of elements at any address.
template <class T, class Function>
void change(std::byte* data, std::size_t count, Function function) {
  for (std::size_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, data + i * sizeof value, sizeof value);
    value = function(value);
    std::memcpy(data + i * sizeof value, &value, sizeof value);
  }
}

template <class T>
void divide_by(std::byte* data, std::size_t count, int divisor) {
  // A narrow integer may not hold the divisor.
  using Divisor = std::conditional_t<std::is_integral_v<T> && sizeof(T) < sizeof(int), int, T>;
  change<T>(data, count,
            [by = static_cast<Divisor>(divisor)](T value) { return static_cast<T>(value / by); });
}

}  // namespace

void divide(Dtype dtype, std::byte* data, std::size_t count, int divisor) {
  const auto by = static_cast<float>(divisor);
  switch (dtype) {
    case Dtype::kInt8: return divide_by<std::int8_t>(data, count, divisor);
    case Dtype::kUint8: return divide_by<std::uint8_t>(data, count, divisor);
    case Dtype::kInt16: return divide_by<std::int16_t>(data, count, divisor);
    case Dtype::kInt32: return divide_by<std::int32_t>(data, count, divisor);
    case Dtype::kInt64: return divide_by<std::int64_t>(data, count, divisor);
    case Dtype::kFloat16:
      return change<Half>(data, count, [by](Half value) { return narrow_half(widen(value) / by); });
    case Dtype::kBfloat16:
      return change<Brain>(data, count, [by](Brain value) { return narrow_brain(widen(value) / by); });
    case Dtype::kFloat32: return divide_by<float>(data, count, divisor);
    case Dtype::kFloat64: return divide_by<double>(data, count, divisor);
    case Dtype::kComplex64: return divide_by<float>(data, 2 * count, divisor);
    case Dtype::kComplex128: return divide_by<double>(data, 2 * count, divisor);
    default: return;  // which have no average
  }
}

bool reduces(Dtype dtype, Op op) noexcept { return found(best(), dtype, op) != nullptr; }

Kernel find_kernel(Dtype dtype, Op op) { return checked(found(best(), dtype, op), dtype, op); }

Kernel find_kernel(Dtype dtype, Op op, const std::string& instruction_set) {
  for (const auto& [set, find] : available())
    if (set == instruction_set) return checked(found(find, dtype, op), dtype, op);
  throw Error(Code::kArgument, "reduction: this machine has no instruction set '" + instruction_set + "'");
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const auto& entry : available()) names.push_back(entry.first);
  return names;
}

}  // namespace torchrelay
