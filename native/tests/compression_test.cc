#include "core/compression.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "check.h"
#include "core/half.h"

using namespace torchrelay;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMost = std::numeric_limits<float>::max();
constexpr std::size_t kCounts[] = {0, 1, 7, 255, 256, 257, 1000};

struct Coded {
  std::vector<std::byte> bytes;
  std::vector<float> values, lost;
};

// Encoded and decoded again; the elements and what is encoded lie at odd addresses.
Coded coded(Compression compression, const std::vector<float>& in, const std::string& set = "baseline") {
  const Codec& codec = *find_codec(compression, Dtype::kFloat32, Op::kSum, set);
  const std::size_t size = in.size() * sizeof(float);
  std::vector<std::byte> elements(size + 1), encoded(codec.size_bytes(in.size()) + 1), out(size + 1);
  Coded result{{}, std::vector<float>(in.size()), std::vector<float>(in.size(), -1.0f)};
  if (size != 0) std::memcpy(elements.data() + 1, in.data(), size);
  codec.encode(elements.data() + 1, in.size(), encoded.data() + 1, result.lost.data());
  codec.decode(encoded.data() + 1, in.size(), out.data() + 1);
  if (size != 0) std::memcpy(result.values.data(), out.data() + 1, size);
  result.bytes.assign(encoded.begin() + 1, encoded.end());
  return result;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// Of all magnitudes; every third run has some that are not finite.
std::vector<float> numbers(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(count);
  int exponent = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (i % 64 == 0) exponent = static_cast<int>(random() % 260) - 140;
    out[i] = std::ldexp(normal(random), exponent);
    if (i / 256 % 3 == 2 && random() % 50 == 0) out[i] = random() % 2 == 0 ? kNan : -kInfinity;
  }
  return out;
}

float largest_of(const std::vector<float>& in, std::size_t first, std::size_t last) {
  float largest = 0.0f;
  for (std::size_t i = first; i < std::min(last, in.size()); ++i)
    if (std::isfinite(in[i])) largest = std::max(largest, std::fabs(in[i]));
  return largest;
}

}  // namespace

TEST(errors_are_bounded_and_known) {
  for (unsigned seed = 0; seed < 20; ++seed)
    for (const std::size_t count : kCounts) {
      const auto in = numbers(count, seed);
      const Coded int8 = coded(Compression::kInt8, in), brain = coded(Compression::kBfloat16, in);
      CHECK(int8.bytes.size() == count + (count + 255) / 256 * 4 && brain.bytes.size() == 2 * count);
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t first = i / 256 * 256;
        if (!std::isfinite(in[i])) {
          CHECK(std::isnan(int8.values[i]) && int8.lost[i] == 0.0f && brain.lost[i] == 0.0f);
          CHECK(std::isnan(in[i]) ? std::isnan(brain.values[i]) : brain.values[i] == in[i]);
          continue;
        }
        const float bound = std::max(largest_of(in, first, first + 256) / 253.0f, 0x1p-127f);
        CHECK(std::fabs(in[i] - int8.values[i]) <= bound && int8.lost[i] == in[i] - int8.values[i]);
        CHECK(std::fabs(in[i] - brain.values[i]) <= std::max(std::fabs(in[i]) / 256.0f, 0x1p-134f));
        CHECK(brain.lost[i] == in[i] - brain.values[i]);
      }
    }
}

TEST(ties_go_to_even_and_whole_numbers_are_exact) {
  const auto int8 = coded(Compression::kInt8, {127.0f, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -127.0f, 64.0f});
  CHECK(int8.values == (std::vector<float>{127.0f, 0.0f, 2.0f, 2.0f, 0.0f, -2.0f, -127.0f, 64.0f}));
  CHECK(int8.lost == (std::vector<float>{0.0f, 0.5f, -0.5f, 0.5f, -0.5f, 0.5f, 0.0f, 0.0f}));
  const auto brain = coded(Compression::kBfloat16, {1.0f + 0x1p-8f, 1.0f + 0x3p-8f, 256.0f, -3.0f});
  CHECK(brain.values == (std::vector<float>{1.0f, 1.0f + 0x1p-6f, 256.0f, -3.0f}));
}

TEST(what_is_not_finite_stays_visible_and_spares_its_neighbours) {
  std::vector<float> in(600, 2.0f);
  in[3] = kNan, in[300] = kInfinity, in[301] = -kInfinity;
  const auto int8 = coded(Compression::kInt8, in), brain = coded(Compression::kBfloat16, in);
  for (std::size_t i = 0; i < in.size(); ++i)
    CHECK(std::isfinite(in[i]) ? int8.values[i] == 2.0f : std::isnan(int8.values[i]));
  CHECK(std::isnan(brain.values[3]) && brain.values[300] == kInfinity && brain.values[301] == -kInfinity);
  CHECK(std::isnan(coded(Compression::kInt8, {kInfinity}).values[0]));
}

TEST(the_ends_of_the_range) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  for (const float largest : {kMost, std::nextafter(kMost, 0.0f), 0x1p127f, 0x1p-126f, 127.0f * 0x1p-126f}) {
    const auto out = coded(Compression::kInt8, {largest, -largest, 0.0f, largest / 2});
    for (std::size_t i = 0; i < 4; ++i) CHECK(std::isfinite(out.values[i]) && std::isfinite(out.lost[i]));
    CHECK(out.values[0] == -out.values[1] && std::fabs(out.values[0] - largest) <= largest / 253.0f);
  }
  CHECK(coded(Compression::kInt8, {tiny, -tiny, 0.0f}).values == (std::vector<float>{0.0f, 0.0f, 0.0f}));
  CHECK(coded(Compression::kInt8, {tiny}).lost[0] == tiny);
  CHECK(coded(Compression::kInt8, std::vector<float>(300, 0.0f)).values == std::vector<float>(300, 0.0f));
  CHECK(coded(Compression::kBfloat16, {kMost}).values[0] == kInfinity);
  CHECK(coded(Compression::kBfloat16, {kMost}).lost[0] == 0.0f);
}

TEST(every_instruction_set_gives_the_same_bits) {
  for (const auto& set : instruction_sets())
    for (const Compression compression : {Compression::kInt8, Compression::kBfloat16})
      for (const std::size_t count : kCounts) {
        const auto in = numbers(count, 77);
        const Coded expected = coded(compression, in), out = coded(compression, in, set);
        CHECK(out.bytes == expected.bytes && same_bits(out.values, expected.values) &&
              same_bits(out.lost, expected.lost));
      }
}

TEST(halves_are_encoded_as_int8_in_float32) {
  for (const Dtype dtype : {Dtype::kFloat16, Dtype::kBfloat16}) {
    const Codec& codec = *find_codec(Compression::kInt8, dtype, Op::kAverage);
    const bool is_half = dtype == Dtype::kFloat16;
    std::vector<std::uint16_t> in, out(300);
    std::vector<float> lost(300);
    for (int i = 0; i < 300; ++i) {
      const float value = static_cast<float>(i % 128);
      in.push_back(is_half ? narrow_half(value).bits : narrow_brain(value).bits);
    }
    std::vector<std::byte> encoded(codec.size_bytes(300));
    codec.encode(reinterpret_cast<std::byte*>(in.data()), 300, encoded.data(), lost.data());
    codec.decode(encoded.data(), 300, reinterpret_cast<std::byte*>(out.data()));
    CHECK(encoded.size() == 308);
    for (std::size_t i = 0; i < 256; ++i) CHECK(out[i] == in[i] && lost[i] == 0.0f);
  }
}

TEST(what_is_not_encoded) {
  using enum Compression;
  CHECK(find_codec(kNone, Dtype::kFloat32, Op::kSum) == nullptr);
  CHECK(find_codec(kInt8, Dtype::kFloat32, Op::kMax) == nullptr);
  CHECK(find_codec(kInt8, Dtype::kFloat64, Op::kSum) == nullptr);
  CHECK(find_codec(kInt8, Dtype::kInt32, Op::kSum) == nullptr);
  CHECK(find_codec(kBfloat16, Dtype::kBfloat16, Op::kSum) == nullptr);
  CHECK(find_codec(kBfloat16, Dtype::kFloat16, Op::kSum) == nullptr);
  CHECK(find_codec(kBfloat16, Dtype::kFloat32, Op::kPremulSum) != nullptr);
}
