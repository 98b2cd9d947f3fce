#include "torchrelay/checkpoint/crc32c.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"

using torchrelay::crc32c;
using torchrelay::crc32c_portable;

namespace {

std::vector<unsigned char> random_bytes(std::size_t size) {
  std::vector<unsigned char> bytes(size);
  std::uint32_t state = 1;
  for (auto& byte : bytes) {
    state = state * 1664525 + 1013904223;
    byte = static_cast<unsigned char>(state >> 24);
  }
  return bytes;
}

}  // namespace

TEST(the_check_value_of_rfc_3720) {
  const std::string digits = "123456789";
  CHECK(crc32c(0, digits.data(), digits.size()) == 0xe3069283);
  CHECK(crc32c_portable(0, digits.data(), digits.size()) == 0xe3069283);
  CHECK(crc32c(0, digits.data(), 0) == 0);
}

TEST(fast_and_portable_agree_at_any_size_and_address) {
  const auto bytes = random_bytes(100'003);
  for (const std::size_t size : {1UL, 7UL, 8UL, 12'287UL, 12'288UL, 24'577UL, 100'000UL}) {
    CHECK(crc32c(0, bytes.data() + 3, size) == crc32c_portable(0, bytes.data() + 3, size));
  }
}

TEST(pieces_give_the_checksum_of_the_whole) {
  const auto bytes = random_bytes(50'000);
  const auto whole = crc32c(0, bytes.data(), bytes.size());
  CHECK(crc32c(crc32c(0, bytes.data(), 17'001), bytes.data() + 17'001, bytes.size() - 17'001) == whole);
}
