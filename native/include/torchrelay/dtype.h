// The element types that the native core computes with. Adding one begins here.
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
};

struct DtypeInfo {
  const char* name;  // torch's
  std::size_t size_bytes;
};

// By Dtype.
inline constexpr DtypeInfo kDtypeInfos[] = {{"int8", 1},     {"uint8", 1},   {"int16", 2},
                                            {"int32", 4},    {"int64", 8},   {"float16", 2},
                                            {"bfloat16", 2}, {"float32", 4}, {"float64", 8}};
inline constexpr int kNumDtypes = static_cast<int>(std::size(kDtypeInfos));

constexpr std::size_t size_bytes(Dtype dtype) noexcept {
  return kDtypeInfos[static_cast<int>(dtype)].size_bytes;
}
constexpr const char* name(Dtype dtype) noexcept { return kDtypeInfos[static_cast<int>(dtype)].name; }

}  // namespace torchrelay
