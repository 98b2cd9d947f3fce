// A send or receive that does not block: through shared memory (mailboxes.h) or over the network
// (transport/messenger.h).
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "torchrelay/error.h"
#include "torchrelay/executor.h"

namespace torchrelay {

namespace transport {
class Messenger;
}

struct Block {
  std::byte* data = nullptr;
  std::size_t size_bytes = 0;
};

inline constexpr int kAnyRank = -1;

// Its data must stay valid until it is done.
class Transfer {
 public:
  Transfer(Block data, int peer, std::int32_t tag, std::uint8_t code, std::chrono::nanoseconds timeout)
      : data_(data), peer_(peer), tag_(tag), code_(code), end_(std::chrono::steady_clock::now() + timeout) {}

  Ticket& ticket() noexcept { return ticket_; }
  // Where a received message came from; valid once it is done.
  int source() const noexcept { return source_; }

 private:
  friend class Mailboxes;
  friend class transport::Messenger;

  bool accepts(int source, std::int32_t tag) const noexcept {
    return tag_ == tag && (peer_ == source || peer_ == kAnyRank);
  }

  Block data_;
  int peer_;  // kAnyRank: receive from any rank
  std::int32_t tag_;
  std::uint8_t code_;
  std::chrono::steady_clock::time_point end_;
  std::size_t moved_ = 0;  // bytes in or out of the ring so far
  bool begun_ = false;
  std::atomic<bool> is_remote_{false};  // over the network, as far as is known
  bool sends_ = false;
  int source_ = -1;
  Ticket ticket_;
};

// A message as its sender describes it: how many bytes of which type.
struct Described {
  std::uint64_t size_bytes;
  std::uint32_t code;
};

// The error of a receive of rank `me` whose message from `source` is not what it expects.
Error mismatch(int me, int source, std::int32_t tag, Described sent, Described expected);

// The error of a transfer of rank `me` that did not end in time; `what` is "recv from " or "send to ", `peer`
// is null for any rank.
Error late(int me, const char* what, const int* peer, std::int32_t tag);

}  // namespace torchrelay
