// Messages between threads, processes and hosts, as the native core sees them.
//
// A Network opens Endpoints. An endpoint has an address; others connect to it under a peer id of their choice
// and send to that id. Delivery is FIFO per pair of endpoints and usually exactly once; ReliableEndpoint
// (parameters/reliable_endpoint.h) tolerates reordering and duplication. Messages do not name their sender.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

namespace torchrelay {

// Bytes and their owner. Copies share the bytes, which do not change once sent.
class Message {
 public:
  Message() = default;
  Message(std::byte* data, std::size_t size_bytes, std::shared_ptr<void> holder)
      : data_(data), size_bytes_(size_bytes), holder_(std::move(holder)) {}

  // Uninitialised bytes of its own.
  static Message allocate(std::size_t size_bytes) {
    std::shared_ptr<std::byte[]> bytes(new std::byte[size_bytes]);
    std::byte* data = bytes.get();
    return Message(data, size_bytes, std::move(bytes));
  }

  std::byte* data() const noexcept { return data_; }
  std::size_t size_bytes() const noexcept { return size_bytes_; }
  const std::shared_ptr<void>& holder() const noexcept { return holder_; }

  // The first size_bytes only.
  void shrink(std::size_t size_bytes) noexcept { size_bytes_ = size_bytes; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_bytes_ = 0;
  std::shared_ptr<void> holder_;
};

// Used by one thread at a time, not always the same.
class Endpoint {
 public:
  virtual ~Endpoint() = default;

  // The address for connect(); opaque, printable, without blanks.
  virtual std::string address() const = 0;

  // Makes `peer` the id of the endpoint at `address`. Does not wait for it to exist. Replaces an older one.
  virtual void connect(std::uint32_t peer, const std::string& address) = 0;
  virtual void disconnect(std::uint32_t peer) = 0;

  // Queues a message for `peer`; never blocks. Throws kArgument for a peer that was not connected.
  virtual void send(std::uint32_t peer, Message message) = 0;

  // Whether the last attempt to reach `peer` was refused: its process has ended. False if unknown.
  virtual bool is_refused(std::uint32_t) const { return false; }

  // Whether messages wait until `peer`, which has not ended, reads earlier ones. False if unknown.
  virtual bool has_unsent(std::uint32_t) const { return false; }

  // The next message, waiting up to `timeout` for it; false if there is none.
  virtual bool receive(Message& message, std::chrono::microseconds timeout) = 0;
};

// Thread-safe. Outlives its endpoints.
class Network {
 public:
  virtual ~Network() = default;
  virtual std::unique_ptr<Endpoint> open(const std::string& label) = 0;
};

}  // namespace torchrelay
