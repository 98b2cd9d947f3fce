// The bytes of one connection, as they are or encrypted (tls.h). Framing and matching lie above.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "net/descriptor.h"

namespace torchrelay::net {

// What a call of a stream moved. `size_bytes` 0 without `ended`: nothing can be moved now.
struct Moved {
  std::size_t size_bytes = 0;
  bool ended = false;
};

enum class Negotiation { kInProgress, kDone, kFailed };

// Never blocks. One thread reads at a time, and one writes. What was read before it ended is not lost.
class Stream {
 public:
  virtual ~Stream() = default;
  // Agrees with the other end on keys: called whenever the socket is readable, or takes what was unsent,
  // until it is done. Nothing is read or written before.
  virtual Negotiation negotiate() { return Negotiation::kDone; }
  // For an event loop: it is readable or writable when the stream is.
  virtual int fd() const noexcept = 0;
  virtual Moved read(std::byte* data, std::size_t size_bytes) = 0;
  virtual Moved write(const iovec* parts, int count) = 0;
  // Whether write() took bytes that the socket did not: it is to be called again, with none if there are
  // none.
  virtual bool has_unsent() const { return false; }
  // Whether read() may have bytes although the socket has none.
  virtual bool has_buffered() const { return false; }
  // What the other end did, "has another key"; empty if it only ended.
  virtual std::string failure() const { return {}; }
};

// As they are, over a connected socket.
class PlainStream : public Stream {
 public:
  explicit PlainStream(Descriptor socket);
  int fd() const noexcept override { return socket_.get(); }
  Moved read(std::byte* data, std::size_t size_bytes) override;
  Moved write(const iovec* parts, int count) override;

 private:
  Descriptor socket_;
};

void send_without_delay(int socket) noexcept;

// Where a process listens: a numeric address, IPv6 with its zone where it needs one.
struct Address {
  std::string host;
  std::uint16_t port = 0;
};

// An address as the kernel takes it, of any family.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// False: not a numeric address and port.
bool resolve(const std::string& host, const std::string& port, SocketAddress& result) noexcept;

// A socket that is being connected, without blocking; empty, with errno set, if that failed at once.
// `prepare` sets its options before.
Descriptor start_connecting(const Address& address) noexcept;
Descriptor start_connecting(const SocketAddress& address, const std::function<void(int)>& prepare = {});

// Why connecting failed, an errno; 0 if it did not.
int connect_error(int socket) noexcept;

// Whether a process listens there. Blocks for at most `timeout`.
bool is_reachable(const Address& address, std::chrono::milliseconds timeout) noexcept;

}  // namespace torchrelay::net
