#include "core/crc32c.h"

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
using torchrelay::FileCopy;

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
  for (const std::size_t block : {1'000UL, 262'144UL, 300'000UL, 2'000'000UL}) {
    std::vector<std::uint64_t> starts;
    std::vector<std::uint64_t> sizes;
    for (std::size_t at = kOffset; at < bytes.size(); at += block) {
      starts.push_back(at);
      sizes.push_back(std::min(block, bytes.size() - at));
    }
    std::vector<std::uint32_t> found(starts.size());
    CHECK(crc32c_of_file(fileno(file), starts, sizes, found) == bytes.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      CHECK(found[i] == crc32c_portable(0, bytes.data() + starts[i], sizes[i]));
    }
  }
  const std::vector<std::uint64_t> scattered{5, 1'000, 400'000, 3, 700'000};
  const std::vector<std::uint64_t> lengths{900, 0, 300'000, 10, 1};
  std::vector<std::uint32_t> each(scattered.size());
  CHECK(crc32c_of_file(fileno(file), scattered, lengths, each) == 700'001);
  for (std::size_t i = 0; i < each.size(); ++i) {
    CHECK(each[i] == crc32c_portable(0, bytes.data() + scattered[i], lengths[i]));
  }
  const std::vector<std::uint64_t> ends{bytes.size() - 10, bytes.size() + 990};
  const std::vector<std::uint64_t> thousands{1'000, 1'000};
  std::vector<std::uint32_t> beyond(2);
  CHECK(crc32c_of_file(fileno(file), ends, thousands, beyond) == bytes.size());
  // Copies that begin and end within blocks, within one read, and across several.
  using Edges = std::vector<std::uint64_t>;
  for (const auto& parts : {Edges{5, 1'000'003}, Edges{7, 9, 20, 300'000, 300'100, 999'000}}) {
    std::vector<unsigned char> copied(bytes.size());
    std::vector<FileCopy> copies;
    for (std::size_t i = 0; i < parts.size(); i += 2) {
      copies.push_back(
          {parts[i], parts[i + 1] - parts[i], reinterpret_cast<std::uint64_t>(&copied[parts[i]])});
    }
    const std::vector<std::uint64_t> halves{5, 500'000};
    const std::vector<std::uint64_t> lengths_of_halves{499'995, 500'003};
    std::vector<std::uint32_t> both(2);
    CHECK(crc32c_of_file(fileno(file), halves, lengths_of_halves, both, copies) == bytes.size());
    for (std::size_t i = 0; i < both.size(); ++i) {
      CHECK(both[i] == crc32c_portable(0, bytes.data() + halves[i], lengths_of_halves[i]));
    }
    for (std::size_t at = 0; at < bytes.size(); ++at) {
      const auto next = std::upper_bound(parts.begin(), parts.end(), at) - parts.begin();
      CHECK(copied[at] == (next % 2 == 1 ? bytes[at] : 0));
    }
  }
  bool refused = false;
  try {
    crc32c_of_file(-1, ends, thousands, beyond);
  } catch (const std::system_error& error) {
    refused = error.code() == std::errc::bad_file_descriptor;
  }
  CHECK(refused);
  std::fclose(file);
}
