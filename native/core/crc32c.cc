#include "core/crc32c.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace torchrelay {
namespace {

constexpr std::size_t kReadBytes = 256 << 10;      // half of a small second-level cache
constexpr std::size_t kDirectBytes = 64 << 10;     // of a copy that is worth a call of its own
constexpr std::uint32_t kPolynomial = 0x82f63b78;  // reflected

using Table = std::array<std::array<std::uint32_t, 256>, 8>;

// kTable[n][b]: the effect of byte b followed by n zero bytes.
constexpr Table make_table() {
  Table table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    table[0][byte] = crc;
  }
  for (std::size_t zeros = 1; zeros < 8; ++zeros) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = table[zeros - 1][byte];
      table[zeros][byte] = (before >> 8) ^ table[0][before & 0xff];
    }
  }
  return table;
}

constexpr Table kTable = make_table();

std::uint64_t load64(const unsigned char* from) {
  std::uint64_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

#if defined(__x86_64__)

constexpr std::size_t kStream = 4096;  // bytes of each of the three streams; a power of two

using Shift = std::array<std::array<std::uint32_t, 256>, 4>;

std::uint32_t shifted(const Shift& shift, std::uint32_t crc) {
  return shift[0][crc & 0xff] ^ shift[1][(crc >> 8) & 0xff] ^ shift[2][(crc >> 16) & 0xff] ^
         shift[3][crc >> 24];
}

// shift[n][b]: the effect of byte n of a checksum, if its value is b, after kStream zero bytes.
Shift make_shift() {
  Shift shift{};  // after one zero byte, then after twice as many again and again
  for (std::size_t position = 0; position < 4; ++position) {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t crc = byte << (8 * position);
      shift[position][byte] = (crc >> 8) ^ kTable[0][crc & 0xff];
    }
  }
  for (std::size_t zeros = 1; zeros < kStream; zeros *= 2) {
    const Shift half = shift;
    for (auto& table : shift) {
      for (auto& crc : table) crc = shifted(half, crc);
    }
  }
  return shift;
}

__attribute__((target("sse4.2"))) std::uint32_t crc32c_sse42(std::uint32_t crc, const unsigned char* data,
                                                             std::size_t size) noexcept {
  static const Shift shift = make_shift();
  std::uint64_t first = ~crc;
  for (; size >= 3 * kStream; size -= 3 * kStream, data += 3 * kStream) {
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t i = 0; i < kStream; i += 8) {
      first = _mm_crc32_u64(first, load64(data + i));
      second = _mm_crc32_u64(second, load64(data + kStream + i));
      third = _mm_crc32_u64(third, load64(data + 2 * kStream + i));
    }
    first = shifted(shift, static_cast<std::uint32_t>(first)) ^ second;
    first = shifted(shift, static_cast<std::uint32_t>(first)) ^ third;
  }
  for (; size >= 8; size -= 8, data += 8) first = _mm_crc32_u64(first, load64(data));
  auto rest = static_cast<std::uint32_t>(first);
  for (; size > 0; --size, ++data) rest = _mm_crc32_u8(rest, *data);
  return ~rest;
}

#endif

// The kernel copies to memory that begins 16 bytes after a line, as malloc returns it, at less than half the
// rate.
struct alignas(64) Line {
  unsigned char bytes[64];
};

std::uint64_t end_of(const FileCopy& copy) { return copy.start + copy.size_bytes; }

unsigned char* at_address(const FileCopy& copy, std::uint64_t at) {
  return reinterpret_cast<unsigned char*>(copy.address + (at - copy.start));
}

}  // namespace

std::uint32_t crc32c_portable(std::uint32_t crc, const void* data, std::size_t size) noexcept {
  const auto* bytes = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; size >= 8; size -= 8, bytes += 8) {
    std::uint32_t next = 0;
    for (std::size_t i = 0; i < 8; ++i) {
      const std::uint32_t byte = bytes[i] ^ (i < 4 ? (crc >> (8 * i)) & 0xff : 0);
      next ^= kTable[7 - i][byte];
    }
    crc = next;
  }
  for (; size > 0; --size, ++bytes) crc = (crc >> 8) ^ kTable[0][(crc ^ *bytes) & 0xff];
  return ~crc;
}

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size) noexcept {
#if defined(__x86_64__)
  static const bool fast = __builtin_cpu_supports("sse4.2") != 0;
  if (fast) return crc32c_sse42(crc, static_cast<const unsigned char*>(data), size);
#endif
  return crc32c_portable(crc, data, size);
}

std::uint64_t crc32c_of_file(int fd, std::span<const std::uint64_t> starts,
                             std::span<const std::uint64_t> sizes, std::span<std::uint32_t> checksums,
                             std::span<const FileCopy> copies) {
  const auto buffer = std::make_unique_for_overwrite<Line[]>(kReadBytes / sizeof(Line));
  unsigned char* data = buffer[0].bytes;  // the bytes of the file from `begin` to `end`
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t at = 0;
  for (std::size_t i = 0; i < starts.size(); ++i) {
    checksums[i] = 0;
    at = starts[i];
    const std::uint64_t last = std::max(starts.back() + sizes.back(), at + sizes[i]);
    for (std::uint64_t left = sizes[i]; left > 0;) {
      if (at < begin || at >= end) {
        while (!copies.empty() && end_of(copies.front()) <= at) copies = copies.subspan(1);
        const bool direct =
            !copies.empty() && copies.front().start <= at && end_of(copies.front()) - at >= kDirectBytes;
        data = direct ? at_address(copies.front(), at) : buffer[0].bytes;
        const std::uint64_t most = (direct ? end_of(copies.front()) : last) - at;
        const auto count = pread(fd, data, std::min<std::uint64_t>(kReadBytes, most), static_cast<off_t>(at));
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) throw std::system_error(errno, std::generic_category());
        if (count == 0) return at;
        begin = at;
        end = at + static_cast<std::uint64_t>(count);
        for (std::size_t j = 0; !direct && j < copies.size() && copies[j].start < end; ++j) {
          const std::uint64_t from = std::max(begin, copies[j].start);
          std::memcpy(at_address(copies[j], from), data + (from - begin),
                      std::min(end, end_of(copies[j])) - from);
        }
      }
      const std::uint64_t size = std::min(left, end - at);
      checksums[i] = crc32c(checksums[i], data + (at - begin), size);
      at += size;
      left -= size;
    }
  }
  return at;
}

}  // namespace torchrelay
