// The sending half of tcp_network.cc: sockets' addresses, and connections that take messages without
// blocking.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "torchrelay/tcp_network.h"
#include "torchrelay/transport/descriptor.h"

namespace torchrelay {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// `interface` is a numeric address or a device's name; port 0. Throws kUnavailable.
SocketAddress address_of_interface(const std::string& interface);
SocketAddress unix_address(const std::string& abstract_name);
// From "direct://host:port" and back. Throws kArgument for anything else.
SocketAddress parse_address(const std::string& text);
std::string address_text(const SocketAddress& address);

class Flusher;

// The connection to one peer. Messages that the socket does not take at once are left to the flusher, in
// order.
class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(const NetworkOptions& options, const SocketAddress& address)
      : options_(options), address_(address) {}

  // Never blocks.
  void send(Message message, Flusher& flusher);
  // Whether the last attempt to connect was refused.
  bool is_refused();
  // No more is sent; what was is given up at `deadline`.
  void close(std::chrono::steady_clock::time_point deadline);

  // --- for the flusher ---
  using Clock = std::chrono::steady_clock;
  // Sends what the socket takes; true if something is left.
  bool flush();
  struct Waiting {
    int fd;       // -1: not connected
    bool closed;  // look at the time
  };
  Waiting waiting();
  bool idle();

 private:
  struct Item {
    Message message;
    std::uint64_t size;  // goes in front of it
    std::size_t sent;    // of both
  };
  // Under the mutex.
  bool flush_locked();
  bool connect_locked();
  bool write_some(Item& item);
  void broken(int error);

  const NetworkOptions options_;
  const SocketAddress address_;
  std::mutex mutex_;
  Descriptor socket_;
  bool refused_ = false;
  std::size_t preamble_sent_ = 0;
  std::deque<Item> backlog_;
  Clock::time_point retry_at_{};
  Clock::time_point give_up_at_ = Clock::time_point::max();
};

// The thread that waits for sockets that were full, or whose peer was not there. Starts when first needed.
class Flusher {
 public:
  Flusher() = default;
  ~Flusher();
  void add(std::shared_ptr<Stream> stream);
  // Waits until `streams` have nothing left, at most until `deadline`.
  static void drain(const std::vector<std::shared_ptr<Stream>>& streams, Stream::Clock::time_point deadline);

 private:
  void run();
  void wake();

  std::mutex mutex_;
  std::vector<std::shared_ptr<Stream>> added_;
  bool stop_ = false;
  Descriptor wake_;  // an eventfd
  std::thread thread_;
};

}  // namespace torchrelay
