// The ZeroMQ implementation of endpoint.h: TCP between hosts, abstract Unix sockets within one network
// namespace.
//
// An endpoint binds one PULL socket and connects one PUSH socket per peer. Each message is preceded by a
// frame that holds a protocol version and the session's token: messages of other sessions are dropped and
// counted, a peer of another version is an error. With CURVE keys, connections are encrypted, and peers
// without the session's public key are refused. Frames above the size limit end the connection that sends
// them.
//
// Order and loss: as TCP's. When a connection breaks, messages in flight are lost and later ones are sent on
// a new connection; ReliableEndpoint detects the gap.
#pragma once

#include <atomic>
#include <chrono>

#include "torchrelay/endpoint.h"
#include "torchrelay/session.h"
#include "torchrelay/zmq_library.h"

namespace torchrelay {

inline constexpr std::uint16_t kZmqProtocolVersion = 1;

struct ZmqOptions : NetworkOptions {
  std::chrono::milliseconds heartbeat{2000};  // a connection without traffic is probed this often; 0: never
  std::string curve_public_key;               // of the session, Z85, 40 characters; empty: no encryption
  std::string curve_secret_key;
};

class ZmqNetwork final : public Network {
 public:
  // Throws kArgument for malformed keys.
  ZmqNetwork(std::shared_ptr<ZmqContext> context, ZmqOptions options);
  ~ZmqNetwork() override;

  // Throws kUnavailable if the interface cannot be bound. Endpoints keep what they need of this object.
  std::unique_ptr<Endpoint> open(const std::string& label) override;

  std::uint64_t ignored_messages() const noexcept;  // of other sessions

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace torchrelay
