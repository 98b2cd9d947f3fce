// A send or receive that does not block: through shared memory (mailboxes.h) or over the network
// (messenger.h).
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>

#include "group/executor.h"

namespace torchrelay {

struct Block {
  std::byte* data = nullptr;
  std::size_t size_bytes = 0;
};

inline constexpr int kAnyRank = -1;
// A receive with tag kAnyTag + c takes any tag whose higher half is c.
inline constexpr std::int64_t kAnyTag = std::numeric_limits<std::int64_t>::min();
inline constexpr std::int64_t kLastAnyTag = kAnyTag + std::numeric_limits<std::int32_t>::max();

// Its data must stay valid until it is done.
class Transfer {
 public:
  Transfer(Block data, int peer, std::int64_t tag, std::uint8_t code, std::chrono::nanoseconds timeout)
      : data_(data), peer_(peer), tag_(tag), code_(code), end_(std::chrono::steady_clock::now() + timeout) {}

  Ticket& ticket() noexcept { return ticket_; }
  // Of a received message, also of one that did not match; valid once it is done.
  int source() const noexcept { return source_; }
  std::int64_t tag() const noexcept { return found_tag_; }
  std::uint64_t size_bytes() const noexcept { return found_bytes_; }

 private:
  friend class Mailboxes;
  template <class Frame>
  friend class Matcher;
  friend class Messenger;

  bool accepts(int source, std::int64_t tag) const noexcept {
    const bool is_any = tag >= 0 && tag_ == kAnyTag + (tag >> 32);
    return (tag_ == tag || is_any) && (peer_ == source || peer_ == kAnyRank);
  }

  void found(int source, std::int64_t tag, std::uint64_t size_bytes) noexcept {
    source_ = source;
    found_tag_ = tag;
    found_bytes_ = size_bytes;
  }

  // The error of rank `me` whose message, found(), from `source` is not what it expects; null if it is.
  std::exception_ptr mismatch(int me, int source, std::uint64_t code) const;
  // That of one that did not end in time.
  std::exception_ptr late(int me, int peer) const;

  Block data_;
  int peer_;  // kAnyRank: receive from any rank
  std::int64_t tag_;
  std::uint8_t code_;
  std::chrono::steady_clock::time_point end_;
  std::size_t moved_ = 0;  // bytes in or out of the ring so far
  bool begun_ = false;
  std::atomic<bool> is_remote_{false};  // over the network, as far as is known
  bool sends_ = false;
  int source_ = -1;
  std::int64_t found_tag_ = 0;
  std::uint64_t found_bytes_ = 0;
  Ticket ticket_;
};

}  // namespace torchrelay
