// The bytes of one connection. Framing and matching lie above; a layer that encrypts is another Stream.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "torchrelay/transport/descriptor.h"

namespace torchrelay::transport {

// What a call of a stream moved. `size_bytes` 0 without `ended`: nothing can be moved now.
struct Moved {
  std::size_t size_bytes = 0;
  bool ended = false;
};

// Never blocks. One thread reads at a time, and one writes. What was read before it ended is not lost.
class Stream {
 public:
  virtual ~Stream() = default;
  // For an event loop: it is readable or writable when the stream is.
  virtual int fd() const noexcept = 0;
  virtual Moved read(std::byte* data, std::size_t size_bytes) = 0;
  virtual Moved write(const iovec* parts, int count) = 0;
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

// Where a process listens: a numeric address, IPv6 with its zone where it needs one.
struct Address {
  std::string host;
  std::uint16_t port = 0;
};

// A socket that is being connected, without blocking; empty, with errno set, if that failed at once.
Descriptor start_connecting(const Address& address) noexcept;

// Why connecting failed, an errno; 0 if it did not.
int connect_error(int socket) noexcept;

// Whether a process listens there. Blocks for at most `timeout`.
bool is_reachable(const Address& address, std::chrono::milliseconds timeout) noexcept;

}  // namespace torchrelay::transport
