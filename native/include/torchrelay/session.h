// What the networks between processes share: authentication, and which peers are on this host.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

namespace torchrelay {

using SessionToken = std::array<unsigned char, 16>;

struct NetworkOptions {
  std::string interface = "127.0.0.1";  // an address that peers can reach
  bool local_sockets = true;            // use Unix sockets to peers of the same network namespace
  SessionToken token{};
  std::size_t max_message_bytes = std::size_t{1} << 30;
  std::chrono::milliseconds linger{1000};  // how long closing waits for unsent messages
  // A connection whose peer sends nothing for this long is closed.
  std::chrono::milliseconds peer_timeout{10000};
  std::chrono::microseconds spin{0};  // receive() polls for this long before it sleeps
};

// Precedes the messages of a peer. Little-endian, as all supported machines.
struct Preamble {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t reserved;
  SessionToken token;
};
static_assert(sizeof(Preamble) == 24);

inline constexpr std::uint32_t kSessionMagic = 0x59'4c'52'54;  // "TRLY"

// In constant time, so that a token cannot be guessed byte by byte.
bool equal(const SessionToken& a, const SessionToken& b) noexcept;

// Equal for processes that can reach each other's abstract Unix sockets; empty if that cannot be known.
std::string network_namespace();

// For an abstract Unix socket.
std::string random_socket_name();

// The Unix part of an "address|socket name|network namespace", if we are in that namespace; else the address.
struct Reachable {
  std::string address;
  bool local;
};
Reachable reachable(const std::string& address, const std::string& namespace_id);

}  // namespace torchrelay
