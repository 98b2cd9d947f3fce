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

// Stores in `checksums` that of each block of `block_bytes` bytes from `offset` of a file; the last block is
// shorter if `size`, the bytes of all, is no multiple. Reads into a buffer that stays in the cache until it
// is checksummed. Returns the bytes read: fewer than `size` if the file ends before. Blocks; throws
// std::system_error.
std::size_t crc32c_of_file(int fd, std::size_t offset, std::size_t size, std::size_t block_bytes,
                           std::span<std::uint32_t> checksums);

}  // namespace torchrelay
