// CRC32C (Castagnoli), the checksum of checkpoints: what a bit flipped on disk or on the way is found by.
//
// With SSE4.2 three independent streams keep the instruction's pipeline full: about the rate at which a core
// reads memory. Elsewhere a table of 8 x 256 entries does it, several times slower, with the same result.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torchrelay {

// The checksum of `size` bytes that follow bytes whose checksum is `crc`; 0 starts. Never blocks or fails.
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size) noexcept;

// The portable implementation, which tests compare the other with.
std::uint32_t crc32c_portable(std::uint32_t crc, const void* data, std::size_t size) noexcept;

}  // namespace torchrelay
