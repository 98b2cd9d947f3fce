// Batches of UDP datagrams (IPv4): many per system call, and several per pass through the kernel's network
// stack where it can take or give them in one piece (UDP GSO and GRO).
#pragma once

#include <netinet/in.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "switch/wire.h"

namespace torchrelay::switchml {

struct Endpoint {
  std::uint32_t ip = 0;    // host byte order
  std::uint16_t port = 0;  // likewise

  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};

// Enlarges the socket's buffers as far as this process may, and asks for GRO and for the count of lost
// datagrams.
void prepare_socket(int fd);

// What has arrived at a socket.
class Inbox {
 public:
  explicit Inbox(int fd);
  ~Inbox();
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;

  // Calls `each` with what is there, at most a batch; never blocks. False if nothing was there, or an error
  // that an earlier send caused (refused()).
  bool receive(const std::function<void(Bytes datagram, const Endpoint& from)>& each);

  // True once the peer of a connected socket has said that nothing listens there.
  bool refused() const noexcept { return refused_; }

  // Datagrams that the kernel dropped because the socket's buffer was full.
  std::uint32_t lost() const noexcept { return lost_; }

 private:
  struct Batch;

  int fd_;
  std::unique_ptr<Batch> batch_;
  bool refused_ = false;
  std::uint32_t lost_ = 0;
};

// Datagrams to be sent with the next flush(). A connected socket ignores their destination.
class Outbox {
 public:
  Outbox(int fd, bool is_connected) : fd_(fd), is_connected_(is_connected) {}

  // Memory for one datagram, valid until the next call.
  std::byte* allocate(std::size_t size);
  // Sends the datagram allocated last to one more destination.
  void send_to(const Endpoint& to);
  // Sends a run of datagrams of one size in memory that stays as it is until flush(). For connected sockets.
  void send_run(Bytes packets, std::size_t packet_bytes);

  // Sends everything. Where the kernel's buffers are full, a connected socket waits; for others what the
  // kernel does not take is lost and counted, so that one slow destination does not stop the rest.
  void flush();

  // As Inbox::refused().
  bool refused() const noexcept { return refused_; }

  std::uint64_t lost() const noexcept { return lost_; }
  // Several datagrams per message from now on, or one.
  void set_segmentation(bool on) noexcept { segmentation_ = on; }

 private:
  struct Entry {
    Endpoint to;
    std::size_t offset;
    std::size_t size;
  };
  struct Messages;

  void flush(std::vector<Entry>& entries, const std::byte* base);
  void send_messages(Messages& messages);

  int fd_;
  bool is_connected_;
  bool segmentation_ = true;
  std::vector<std::byte> bytes_;
  std::vector<Entry> entries_;
  std::uint64_t lost_ = 0;
  bool refused_ = false;
};

}  // namespace torchrelay::switchml
