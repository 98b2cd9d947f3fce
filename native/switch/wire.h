// SwitchML's UDP packets: a header of 10 bytes, then 64 or 256 int32. Everything is big-endian.
//
//   byte 0     message type (high 4 bits), 1 unused bit, size code (1: 64 values, 3: 256 values)
//   byte 1     job
//   bytes 2-5  tsi: the packet's id; the switch only echoes and, in sequenced sessions, compares it
//   bytes 6-7  bit 15: the slot's set; bits 0-13: the slot, below 8192
//   bytes 8-9  two signed exponents, each answered with its maximum; our workers use the first
//
// Answers have 0 in the unused bits.
//
// Message type 1 is data, as in SwitchML's P4 program. Type 2 is control between our workers and our switch;
// a switch that does not know it drops it. parse() believes nothing it has not checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "switch/protocol.h"

namespace torchrelay::switchml {

using Bytes = std::span<const std::byte>;

inline constexpr std::size_t kMaxPacketBytes = kHeaderBytes + kMaxNumel * sizeof(std::int32_t);

struct Header {
  std::uint8_t job = 0;
  std::uint32_t tsi = 0;
  std::uint16_t slot = 0;
  std::uint8_t set = 0;  // 0 or 1
  std::int8_t exponent = 0;
  std::uint16_t numel = kMaxNumel;  // values of the payload: 64 or 256
  std::int8_t second_exponent = 0;
};

constexpr std::size_t packet_bytes(std::uint16_t numel) noexcept {
  return kHeaderBytes + numel * sizeof(std::int32_t);
}

constexpr bool is_packet_numel(std::uint32_t numel) noexcept { return numel == 64 || numel == 256; }

// The header of a data packet; nothing if the datagram is not exactly one such packet.
std::optional<Header> parse(Bytes datagram) noexcept;

// The kind of a control message that a worker sends: kJoin, kLeave, kAskMissing or kAlive. What else it says
// is not for the data plane. A member sends kAlive from time to time when it has no data to send.
std::optional<ControlKind> parse_request(Bytes datagram) noexcept;

inline constexpr std::size_t kAliveBytes = 12;
void write_alive(std::byte* out) noexcept;

// Writes the 10 bytes of the header.
void serialize(const Header& header, std::byte* out) noexcept;

// The kind of a message that a switch sends by itself: kUnknownSession or kCoalesced.
std::optional<ControlKind> parse_notice(Bytes datagram) noexcept;

}  // namespace torchrelay::switchml
