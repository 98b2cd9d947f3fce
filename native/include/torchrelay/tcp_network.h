// Endpoints over plain sockets: TCP between hosts, abstract Unix sockets within one network namespace.
//
// The thread that sends writes into the socket, and the thread that receives reads from it, so that a request
// and its answer wake two threads. What a socket does not accept at once is sent by the process's event loop.
//
// A connection carries messages one way: a greeting, then a frame each (transport/frames.h). One above the
// size limit ends the connection. A member of the session with another version is an error.
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
