#include "switch/wire.h"

namespace torchrelay::switchml {
namespace {

constexpr std::uint8_t kControlVersion = 1;

std::uint32_t byte(Bytes data, std::size_t at) noexcept { return std::to_integer<std::uint32_t>(data[at]); }

std::uint16_t read16(Bytes data, std::size_t at) noexcept {
  return static_cast<std::uint16_t>(byte(data, at) << 8 | byte(data, at + 1));
}

std::uint32_t read32(Bytes data, std::size_t at) noexcept {
  return static_cast<std::uint32_t>(read16(data, at)) << 16 | read16(data, at + 2);
}

// The kind of a control message, if it is one of `kinds`.
std::optional<ControlKind> parse_control(Bytes datagram, std::initializer_list<ControlKind> kinds) noexcept {
  if (datagram.size() < kHeaderBytes || byte(datagram, 0) >> 4 != kControlType) return {};
  for (const ControlKind kind : kinds)
    if (byte(datagram, 1) == kind) return kind;
  return {};
}

}  // namespace

std::optional<Header> parse(Bytes datagram) noexcept {
  if (datagram.size() < kHeaderBytes || byte(datagram, 0) >> 4 != kDataType) return {};
  const std::uint32_t code = byte(datagram, 0) & 7;
  if (code != kSmallCode && code != kLargeCode) return {};
  Header header;
  header.numel = code == kSmallCode ? 64 : 256;
  if (datagram.size() != packet_bytes(header.numel)) return {};
  header.job = static_cast<std::uint8_t>(byte(datagram, 1));
  header.tsi = read32(datagram, 2);
  const std::uint16_t index = read16(datagram, 6);
  header.slot = index & kSlotBits;
  header.set = (index & kSetBit) != 0;
  header.exponent = static_cast<std::int8_t>(byte(datagram, 8));
  header.second_exponent = static_cast<std::int8_t>(byte(datagram, 9));
  return header;
}

void serialize(const Header& header, std::byte* out) noexcept {
  const int code = header.numel == 64 ? kSmallCode : kLargeCode;
  const auto index = static_cast<std::uint16_t>(header.slot | (header.set != 0 ? kSetBit : 0));
  out[0] = static_cast<std::byte>(kDataType << 4 | code);
  out[1] = static_cast<std::byte>(header.job);
  for (int i = 0; i < 4; ++i) out[2 + i] = static_cast<std::byte>(header.tsi >> (24 - 8 * i));
  out[6] = static_cast<std::byte>(index >> 8);
  out[7] = static_cast<std::byte>(index);
  out[8] = static_cast<std::byte>(header.exponent);
  out[9] = static_cast<std::byte>(header.second_exponent);
}

void write_alive(std::byte* out) noexcept {
  for (std::size_t i = 0; i < kAliveBytes; ++i) out[i] = std::byte{0};
  out[0] = static_cast<std::byte>(kControlType << 4);
  out[1] = static_cast<std::byte>(kAlive);
  out[3] = static_cast<std::byte>(kControlVersion);
}

std::optional<ControlKind> parse_request(Bytes datagram) noexcept {
  return parse_control(datagram, {kJoin, kLeave, kAskMissing, kAlive});
}

std::optional<ControlKind> parse_notice(Bytes datagram) noexcept {
  return parse_control(datagram, {kUnknownSession, kCoalesced});
}

}  // namespace torchrelay::switchml
