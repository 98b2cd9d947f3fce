// Endpoints over plain sockets: TCP between hosts, abstract Unix sockets within one network namespace.
//
// The thread that sends writes into the socket, and the thread that receives reads from it: a request and its
// answer wake two threads, where a library with I/O threads of its own wakes six. A thread of the network's
// sends only what a socket does not accept at once. Nothing is encrypted; zmq_network.h can encrypt.
//
// A connection carries messages one way. It starts with a preamble, which holds a protocol version and the
// session's token: a connection without it is closed and counted, a peer of another version is an error. A
// message is its size (8 bytes), then its bytes; one above the size limit ends the connection.
//
// Order and loss: as TCP's. When a connection breaks, messages in flight are lost and later ones are sent on
// a new connection; ReliableEndpoint detects the gap.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "torchrelay/endpoint.h"
#include "torchrelay/session.h"

namespace torchrelay {

inline constexpr std::uint16_t kTcpProtocolVersion = 1;

class TcpNetwork final : public Network {
 public:
  explicit TcpNetwork(NetworkOptions options);
  ~TcpNetwork() override;

  // Throws kUnavailable if the interface cannot be bound. Endpoints keep what they need of this object.
  std::unique_ptr<Endpoint> open(const std::string& label) override;

  std::uint64_t ignored_connections() const noexcept;  // of other sessions

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace torchrelay
