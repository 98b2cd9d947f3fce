#include "core/reduce.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <random>

#include "check.h"

using namespace torchrelay;

namespace {

constexpr Dtype kDtypes[] = {Dtype::kInt8,     Dtype::kUint8,   Dtype::kInt16,
                             Dtype::kInt32,    Dtype::kInt64,   Dtype::kFloat16,
                             Dtype::kBfloat16, Dtype::kFloat32, Dtype::kFloat64};

template <class T>
std::vector<T> reduced(Dtype dtype, Op op, const std::vector<std::vector<T>>& sources,
                       const std::string& set = "baseline") {
  std::vector<const std::byte*> in;
  for (const auto& source : sources) in.push_back(reinterpret_cast<const std::byte*>(source.data()));
  std::vector<T> out(sources[0].size());
  find_kernel(dtype, op, set)(in.data(), static_cast<int>(in.size()),
                              reinterpret_cast<std::byte*>(out.data()), out.size());
  return out;
}

}  // namespace

TEST(sums_products_extremes_and_bits) {
  const std::vector<std::vector<std::int32_t>> in = {{1, -7, 12}, {5, 3, 10}, {-2, 2, 6}};
  CHECK(reduced(Dtype::kInt32, Op::kSum, in) == std::vector<std::int32_t>{4, -2, 28});
  CHECK(reduced(Dtype::kInt32, Op::kAverage, in) == std::vector<std::int32_t>{1, 0, 9});
  CHECK(reduced(Dtype::kInt32, Op::kProduct, in) == std::vector<std::int32_t>{-10, -42, 720});
  CHECK(reduced(Dtype::kInt32, Op::kMin, in) == std::vector<std::int32_t>{-2, -7, 6});
  CHECK(reduced(Dtype::kInt32, Op::kMax, in) == std::vector<std::int32_t>{5, 3, 12});
  CHECK(reduced(Dtype::kInt32, Op::kAnd, in) ==
        std::vector<std::int32_t>{1 & 5 & -2, -7 & 3 & 2, 12 & 10 & 6});
  CHECK(reduced(Dtype::kInt32, Op::kOr, in) ==
        std::vector<std::int32_t>{1 | 5 | -2, -7 | 3 | 2, 12 | 10 | 6});
  CHECK(reduced(Dtype::kInt32, Op::kXor, in) ==
        std::vector<std::int32_t>{1 ^ 5 ^ -2, -7 ^ 3 ^ 2, 12 ^ 10 ^ 6});
}

TEST(averages_of_narrow_integers_over_more_sources_than_they_can_count) {
  for (const auto& set : instruction_sets()) {
    std::vector<std::vector<std::int8_t>> in(130, {0, -1});
    in[0] = {127, 2};
    CHECK(reduced(Dtype::kInt8, Op::kAverage, in, set) == std::vector<std::int8_t>{0, 0});  // -127 / 130
    const std::vector<std::vector<std::uint8_t>> zeros(256, {0});
    CHECK(reduced(Dtype::kUint8, Op::kAverage, zeros, set) == std::vector<std::uint8_t>{0});
  }
}

TEST(integers_wrap) {
  CHECK(reduced<std::int8_t>(Dtype::kInt8, Op::kSum, {{127}, {1}})[0] == -128);
  CHECK(reduced<std::int16_t>(Dtype::kInt16, Op::kProduct, {{-32768}, {-1}})[0] == -32768);
  CHECK(
      reduced<std::int64_t>(Dtype::kInt64, Op::kSum, {{std::numeric_limits<std::int64_t>::max()}, {1}})[0] ==
      std::numeric_limits<std::int64_t>::min());
}

TEST(extremes_of_a_nan_are_nan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Op op : {Op::kMin, Op::kMax}) {
    const auto out = reduced<float>(Dtype::kFloat32, op, {{nan, 1.0f}, {1.0f, nan}});
    CHECK(std::isnan(out[0]) && std::isnan(out[1]));
  }
}

// 2049 is not a float16: adding 1 twice to 2048 one at a time would stay at 2048.
TEST(half_precision_is_rounded_once) {
  const auto out = reduced<std::uint16_t>(Dtype::kFloat16, Op::kSum, {{0x6800}, {0x3C00}, {0x3C00}});
  CHECK(out[0] == 0x6801);  // 2050
  const auto brain = reduced<std::uint16_t>(Dtype::kBfloat16, Op::kSum, {{0x4380}, {0x3F80}, {0x3F80}});
  CHECK(brain[0] == 0x4381);  // 256 + 1 + 1 = 258
}

TEST(every_float16_survives_alone) {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  for (const auto& set : instruction_sets()) {
    const auto out = reduced<std::uint16_t>(Dtype::kFloat16, Op::kSum, {all}, set);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const bool nan = (i & 0x7FFF) > 0x7C00;
      CHECK(nan ? (out[i] & 0x7FFF) > 0x7C00 : out[i] == i);
    }
  }
}

// Any bytes, as any type, through each instruction set: the same bits (but for the payload of a NaN).
TEST(instruction_sets_agree) {
  std::mt19937 random(7);
  for (const Dtype dtype : kDtypes)
    for (const Op op : {Op::kSum, Op::kAverage, Op::kProduct, Op::kMin, Op::kMax, Op::kAnd}) {
      const bool real = dtype >= Dtype::kFloat16;
      if (real && op == Op::kAnd) continue;
      for (const std::size_t count : {1, 7, 1023, 1024, 3000}) {
        std::vector<std::vector<std::byte>> in(3, std::vector<std::byte>(count * size_bytes(dtype)));
        for (auto& source : in)
          for (auto& byte : source) byte = static_cast<std::byte>(random());
        std::vector<const std::byte*> sources;
        for (auto& source : in) sources.push_back(source.data());
        std::vector<std::byte> expected(in[0].size()), got(in[0].size());
        find_kernel(dtype, op, "baseline")(sources.data(), 3, expected.data(), count);
        for (const auto& set : instruction_sets()) {
          find_kernel(dtype, op, set)(sources.data(), 3, got.data(), count);
          std::size_t different = 0;
          for (std::size_t i = 0; i < count; ++i) {
            const std::size_t at = i * size_bytes(dtype), size = size_bytes(dtype);
            if (std::memcmp(&expected[at], &got[at], size) == 0) continue;
            double a = 0, b = 0;
            if (dtype == Dtype::kFloat32) {
              float x, y;
              std::memcpy(&x, &expected[at], 4);
              std::memcpy(&y, &got[at], 4);
              a = static_cast<double>(x);
              b = static_cast<double>(y);
            } else if (dtype == Dtype::kFloat64) {
              std::memcpy(&a, &expected[at], 8);
              std::memcpy(&b, &got[at], 8);
            } else if (real) {
              std::uint16_t x, y;
              std::memcpy(&x, &expected[at], 2);
              std::memcpy(&y, &got[at], 2);
              const int infinity = dtype == Dtype::kFloat16 ? 0x7C00 : 0x7F80;
              if ((x & 0x7FFF) > infinity && (y & 0x7FFF) > infinity) continue;
            }
            if (!(std::isnan(a) && std::isnan(b))) ++different;
          }
          CHECK(different == 0);
        }
      }
    }
}

TEST(bools_are_reduced_as_logic) {
  const std::vector<std::vector<std::uint8_t>> in = {{0, 0, 1, 1}, {0, 1, 0, 1}};
  const std::vector<std::uint8_t> either = {0, 1, 1, 1}, both = {0, 0, 0, 1}, one = {0, 1, 1, 0};
  for (const auto& set : instruction_sets()) {
    for (const Op op : {Op::kSum, Op::kMax, Op::kOr}) CHECK(reduced(Dtype::kBool, op, in, set) == either);
    for (const Op op : {Op::kProduct, Op::kMin, Op::kAnd}) CHECK(reduced(Dtype::kBool, op, in, set) == both);
    CHECK(reduced(Dtype::kBool, Op::kXor, in, set) == one);
  }
  CHECK(!reduces(Dtype::kBool, Op::kAverage));
}

TEST(complex_numbers_are_added_as_pairs) {
  using Complex = std::complex<float>;
  const std::vector<std::vector<Complex>> in = {{{1, 2}, {3, 4}}, {{-1, 2}, {5, 6}}};
  CHECK(reduced(Dtype::kComplex64, Op::kSum, in) == std::vector<Complex>{{0, 4}, {8, 10}});
  CHECK(reduced(Dtype::kComplex64, Op::kPremulSum, in) == std::vector<Complex>{{0, 4}, {8, 10}});
  CHECK(reduced(Dtype::kComplex64, Op::kAverage, in) == std::vector<Complex>{{0, 2}, {4, 5}});
  for (const Op op : {Op::kProduct, Op::kMin, Op::kMax, Op::kAnd}) CHECK(!reduces(Dtype::kComplex128, op));
  for (const Dtype dtype : {Dtype::kUint16, Dtype::kComplex32, Dtype::kFloat8E5m2})
    CHECK(!reduces(dtype, Op::kSum));
}

TEST(the_result_may_replace_a_source) {
  std::vector<float> a(5000, 1.5f), b(5000, 2.0f);
  const std::byte* in[] = {reinterpret_cast<std::byte*>(a.data()), reinterpret_cast<std::byte*>(b.data())};
  find_kernel(Dtype::kFloat32, Op::kSum)(in, 2, reinterpret_cast<std::byte*>(b.data()), b.size());
  CHECK(std::all_of(b.begin(), b.end(), [](float x) { return x == 3.5f; }));
}

TEST(bits_of_floats_are_refused) {
  CHECK_THROWS(Code::kArgument, find_kernel(Dtype::kFloat32, Op::kAnd));
  CHECK_THROWS(Code::kArgument, find_kernel(Dtype::kFloat32, Op::kSum, "sse9"));
}
