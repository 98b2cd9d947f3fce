// Endpoints over sockets: TCP, encrypted if there is a key, and abstract Unix sockets within one network
// namespace.
//
// The thread that sends writes into the socket, and the thread that receives reads from it, so that a request
// and its answer wake two threads. What a socket does not accept at once is sent by the process's event loop.
//
// A connection carries messages one way: a greeting, then a frame each (frames.h). One above the
// size limit ends the connection. A member of the session with another version is an error.
//
// Order and loss: as TCP's. When a connection breaks, messages in flight are lost and later ones are sent on
// a new connection; ReliableEndpoint detects the gap.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "net/endpoint.h"
#include "net/session.h"
#include "net/tls.h"

namespace torchrelay {

struct NetworkOptions {
  std::string interface = "127.0.0.1";  // an address that peers can reach
  bool local_sockets = true;            // use Unix sockets to peers of the same network namespace
  SessionToken token{};
  std::shared_ptr<const net::Tls> tls{};  // of TCP connections; null: they are not encrypted
  std::size_t max_message_bytes = std::size_t{1} << 30;
  std::chrono::milliseconds linger{1000};  // how long closing waits for unsent messages
  // A connection whose peer sends nothing for this long is closed.
  std::chrono::milliseconds peer_timeout{10000};
  std::chrono::milliseconds greeting_timeout{5000};  // of a new connection
};

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
