// CRC32C (Castagnoli), the checksum of checkpoints. It finds bits that were flipped on a disk or on the way.
//
// With SSE4.2, three independent streams keep the instruction's pipeline full: twice the rate at which a core
// reads memory. Elsewhere a table of 8 x 256 entries gives the same result, several times slower.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace torchrelay {

// The checksum of `size` bytes that follow bytes whose checksum is `crc`; 0 starts. Never blocks or fails.
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size) noexcept;

// The portable implementation, which tests compare the other with.
std::uint32_t crc32c_portable(std::uint32_t crc, const void* data, std::size_t size) noexcept;

// Bytes of a file, and where they go in memory.
struct FileCopy {
  std::uint64_t start;
  std::uint64_t size_bytes;
  std::uint64_t address;
};

// Stores in `checksums` that of each range of a file, of `sizes[i]` bytes from `starts[i]`. Reads what lies
// between the ranges too, if they ascend, in pieces that stay in the cache until they are checksummed. Of
// ranges that ascend, `copies` are stored in memory too: parts of them that ascend and do not overlap.
// Returns the end of the last range, or of the file if it ends before. Blocks; throws std::system_error.
std::uint64_t crc32c_of_file(int fd, std::span<const std::uint64_t> starts,
                             std::span<const std::uint64_t> sizes, std::span<std::uint32_t> checksums,
                             std::span<const FileCopy> copies = {});

}  // namespace torchrelay
