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

namespace torchrelay::switchml {

using Bytes = std::span<const std::byte>;

inline constexpr std::uint16_t kUdpPort = 0xBEE0;
inline constexpr std::uint16_t kNumUdpPorts = 16;  // a switch at kUdpPort takes so many, as SwitchML's does
inline constexpr std::size_t kHeaderBytes = 10;
inline constexpr std::uint16_t kMaxNumel = 256;
inline constexpr std::size_t kMaxPacketBytes = kHeaderBytes + kMaxNumel * sizeof(std::int32_t);
inline constexpr std::uint16_t kMaxSlots = 1 << 13;
inline constexpr std::uint8_t kDataType = 1;
inline constexpr std::uint8_t kControlType = 2;

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

// What a worker sends to the control plane: kind (byte 1) of a control message. What else it says is not for
// the data plane. A member sends kAlive from time to time when it has no data to send.
enum class Request : std::uint8_t { kJoin = 1, kLeave = 6, kAskMissing = 7, kAlive = 10 };
std::optional<Request> parse_request(Bytes datagram) noexcept;

inline constexpr std::size_t kAliveBytes = 12;
void write_alive(std::byte* out) noexcept;

// Writes the 10 bytes of the header.
void serialize(const Header& header, std::byte* out) noexcept;

// What a switch answers to a worker by itself: kind (byte 1) and session (bytes 4-11) of a control message.
enum class Notice : std::uint8_t { kUnknownSession = 4, kCoalesced = 5 };
std::optional<Notice> parse_notice(Bytes datagram) noexcept;

}  // namespace torchrelay::switchml
