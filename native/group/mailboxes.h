// Messages between two ranks of a SharedGroup: send and receive that do not block, with tags.
//
// Each ordered pair of ranks has a ring of bytes in the segment. A message is a frame: its size, tag and
// type, then its bytes, and may be larger than the ring: both sides announce every part of it that they have
// moved, so that one reads a part while the other writes the next. Messages of one pair and tag arrive in the
// order they were sent. A message for which nothing is posted stays in the ring, unless another message
// behind it is needed: then it is moved to memory.
//
// Transfers are driven by the threads that wait for one, else by a thread that starts with the first transfer
// that does not end at once.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "group/collectives.h"
#include "group/executor.h"
#include "group/matcher.h"
#include "group/shared_group.h"

namespace torchrelay {

class Mailboxes {
 public:
  explicit Mailboxes(SharedGroup& group);
  ~Mailboxes() { stop(); }

  // Throw kArgument if there is no such rank or the tag is negative, or the group's earlier failure.
  // A message whose size or type is not what the receiver expects fails the receive with kMismatch.
  std::shared_ptr<Transfer> send(Block data, int to, std::int64_t tag, std::uint8_t code,
                                 std::chrono::nanoseconds timeout);
  // One that has begun, because its message was announced, cannot be taken back: it breaks the group if it is
  // not done in time.
  std::shared_ptr<Transfer> receive(Block data, int from, std::int64_t tag, std::uint8_t code,
                                    std::chrono::nanoseconds timeout, bool has_begun = false);

  // Drives transfers until this one is done; throws what it failed with. false: not done within timeout. With
  // none, it moves what can be moved at once.
  bool wait(Transfer& transfer, std::chrono::nanoseconds timeout, Patience patience,
            const std::function<void()>& poll);

  // Fails everything in progress and ends the thread.
  void stop();

 private:
  struct Ring;
  struct Frame {
    std::uint64_t size_bytes;
    std::int64_t tag;
    std::uint64_t code;
  };
  // What is being read from one peer.
  struct Inbox {
    bool open = false;  // a frame's header was read and its bytes are not all here
    Frame frame{};
    std::uint64_t got = 0;
    std::shared_ptr<Transfer> target;  // null: moved to memory, or dropped if the tag is negative
    std::vector<std::byte> scratch;
  };
  struct Ended {
    std::shared_ptr<Transfer> transfer;
    std::exception_ptr error;
  };

  Ring& ring(int from, int to) const noexcept;
  bool turn(std::unique_lock<std::mutex>& guard, Transfer* awaited, Patience patience,
            std::chrono::steady_clock::time_point& looked);
  bool step(std::unique_lock<std::mutex>& guard);
  bool push(std::vector<Ended>& ended);
  bool pull(int from, std::vector<Ended>& ended);
  bool open_frame(int from, std::vector<Ended>& ended);
  void close_frame(int from, std::vector<Ended>& ended);
  bool has_unread(int from);
  void look_after_peers();
  void expire(std::vector<Ended>& ended);
  void fail_all(std::exception_ptr error);
  void drive(const std::shared_ptr<Transfer>& transfer);
  void loop();
  bool busy() const;

  SharedGroup& group_;
  Matcher<Frame> matcher_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::vector<std::deque<std::shared_ptr<Transfer>>> outgoing_;  // a queue per peer
  std::vector<Inbox> inboxes_;
  int waiters_ = 0;
  bool stopping_ = false;
  bool failed_ = false;  // nothing moves any more
  std::thread thread_;
};

}  // namespace torchrelay
