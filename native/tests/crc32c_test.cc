#include "torchrelay/checkpoint/crc32c.h"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <system_error>
#include <vector>

#include "check.h"

using torchrelay::crc32c;
using torchrelay::crc32c_of_file;
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

TEST(blocks_of_a_file_have_the_checksums_of_their_bytes) {
  const auto bytes = random_bytes(1'000'003);
  std::FILE* file = std::tmpfile();
  CHECK(std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size() && std::fflush(file) == 0);
  constexpr std::size_t kOffset = 5;
  const std::size_t size = bytes.size() - kOffset;
  for (const std::size_t block : {1'000UL, 262'144UL, 300'000UL, 2'000'000UL}) {
    std::vector<std::uint32_t> found((size + block - 1) / block);
    CHECK(crc32c_of_file(fileno(file), kOffset, size, block, found) == size);
    for (std::size_t i = 0; i < found.size(); ++i) {
      const std::size_t start = kOffset + i * block;
      CHECK(found[i] == crc32c_portable(0, bytes.data() + start, std::min(block, bytes.size() - start)));
    }
  }
  std::vector<std::uint32_t> beyond(2);
  CHECK(crc32c_of_file(fileno(file), bytes.size() - 10, 2'000, 1'000, beyond) == 10);
  bool refused = false;
  try {
    crc32c_of_file(-1, 0, 10, 10, beyond);
  } catch (const std::system_error& error) {
    refused = error.code() == std::errc::bad_file_descriptor;
  }
  CHECK(refused);
  std::fclose(file);
}
