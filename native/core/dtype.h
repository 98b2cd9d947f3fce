// The element types of tensors. Adding one begins here; reduce.h says which are
// reduced.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

namespace torchrelay {

enum class Dtype : std::uint8_t {
  kInt8,
  kUint8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat64,
  kBool,
  kComplex64,
  kComplex128,
  kComplex32,
  kUint16,
  kUint32,
  kUint64,
  kFloat8E4m3fn,
  kFloat8E5m2,
};

struct DtypeInfo {
  const char* name;  // torch's
  std::size_t size_bytes;
};

// By Dtype.
inline constexpr DtypeInfo kDtypeInfos[] = {
    {"int8", 1},      {"uint8", 1},         {"int16", 2},      {"int32", 4},   {"int64", 8},
    {"float16", 2},   {"bfloat16", 2},      {"float32", 4},    {"float64", 8}, {"bool", 1},
    {"complex64", 8}, {"complex128", 16},   {"complex32", 4},  {"uint16", 2},  {"uint32", 4},
    {"uint64", 8},    {"float8_e4m3fn", 1}, {"float8_e5m2", 1}};
inline constexpr int kNumDtypes = static_cast<int>(std::size(kDtypeInfos));

constexpr std::size_t size_bytes(Dtype dtype) noexcept {
  return kDtypeInfos[static_cast<int>(dtype)].size_bytes;
}
constexpr const char* name(Dtype dtype) noexcept { return kDtypeInfos[static_cast<int>(dtype)].name; }

}  // namespace torchrelay
