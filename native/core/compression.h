// Lossy encodings of what leaves a host.
//
// int8: runs of kRun elements, the last one shorter. Each has a step, max|x| / 127 over its finite elements,
// as a float32, then x / step for each element, rounded to nearest even; -128 stands for an element that is
// not finite, and is decoded as NaN. A step is at least 2^-126, and 127 steps are finite. An element's error
// is at most max|x| / 253 or 2^-127, whichever is larger.
//
// bfloat16: rounded to nearest even. An element's error is at most |x| / 2^8 or 2^-134; above about
// 3.39e38, it becomes infinite. NaN and infinities stay what they are.
//
// The bits are the same whatever the instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/reduce.h"

namespace torchrelay {

enum class Compression : std::uint8_t { kNone, kInt8, kBfloat16 };

// By Compression.
inline constexpr const char* kCompressionNames[] = {"none", "int8", "bf16"};

constexpr const char* name(Compression compression) noexcept {
  return kCompressionNames[static_cast<int>(compression)];
}

struct Codec {
  static constexpr std::size_t kRun = 256;

  // Of `count` elements. `lost`, if not null, gets what the encoding lost of each; of one that is not finite,
  // or becomes infinite, 0.
  void (*encode)(const std::byte* elements, std::size_t count, std::byte* out, float* lost);
  void (*decode)(const std::byte* encoded, std::size_t count, std::byte* out);
  std::size_t (*size_bytes)(std::size_t count);  // of what is encoded
};

// How a call encodes what leaves its host.
struct Encoding {
  Compression compression = Compression::kNone;
  // Null, or an element for each of the call's: gets what this rank's encodings lost of the sum, and keeps
  // its values elsewhere.
  float* lost = nullptr;
};

// Null where a reduction is not encoded: all but sums and averages of float32, and, with int8, of float16 and
// bfloat16.
const Codec* find_codec(Compression compression, Dtype dtype, Op op);

// The same for a named instruction set, one of instruction_sets(); for tests.
const Codec* find_codec(Compression compression, Dtype dtype, Op op, const std::string& instruction_set);

}  // namespace torchrelay
