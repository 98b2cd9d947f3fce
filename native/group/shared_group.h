// Ranks of one host that communicate through a shared segment.
//
// Each rank owns its RankState (counters) and two rings of memory in which it publishes bytes for the others
// to read: its own data in slots, what it reduced in results. Ranks synchronise with synchronize(): a rank
// announces that it has arrived at the next step and waits until all have. What a rank published before a
// step, the others may read after it and until the next one; reading of one step overlaps writing of the
// next, so no second barrier is needed.
//
// The rings are larger than two steps need, because a core writes slowly (at a third of the speed, where this
// was measured) to lines that another core's L2 still holds. By the time a ring wraps around, these have
// moved to the cache that the cores share.
//
// A segment is used by one group. Each process has one SharedGroup over it, and calls it from one thread at a
// time; ranks may also be threads of one process.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/liveness.h"
#include "core/shared_memory.h"
#include "core/wait.h"
#include "group/call.h"

namespace torchrelay {

// One operation in progress: how long it may take, how it waits, who may stop it.
struct Operation {
  const char* name = "";  // for messages
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  std::chrono::nanoseconds timeout{0};
  Patience patience;
  std::function<void()> poll;  // called about 20 times a second while waiting; throws to stop

  double elapsed_s() const;
};

class SharedGroup {
 public:
  // A few times what a core's private caches hold.
  static constexpr std::size_t kRingBytes = std::size_t{4} << 20;

  struct Shape {
    int size = 1;
    std::size_t slot_bytes = 0;  // how much a rank can publish in a step
    // If a rank reads at most this much from the others, all_reduce takes one step; at most slot_bytes.
    std::size_t one_shot_bytes = 0;
    std::size_t mailbox_bytes = 0;        // of the ring between each ordered pair of ranks
    std::size_t ring_bytes = kRingBytes;  // of all ranks' slots together, if that is enough for three each
  };

  // How often a waiter checks that the ranks it waits for are alive.
  static constexpr std::chrono::milliseconds kSlice{50};
  static constexpr int kMaxSize = 1024;
  static constexpr std::size_t kMaxReason = 1000;
  static constexpr std::size_t kMaxReasonNames = 64;

  static SharedMemory create(const Shape& shape);

  // Registers this rank. `names` are the ranks as users know them (of the default group), for messages.
  SharedGroup(SharedMemory memory, int rank, std::vector<int> names);
  ~SharedGroup();
  SharedGroup(const SharedGroup&) = delete;
  SharedGroup& operator=(const SharedGroup&) = delete;

  // Waits until all ranks have registered.
  void join(const Operation& operation);

  // Whether more ranks have joined than there are cores for them: then waiting ranks should yield.
  bool oversubscribed() const noexcept;

  // Announces that this rank leaves; operations that wait for it fail. Idempotent.
  void leave() noexcept;

  // Throws kArgument unless 0 <= rank < size(). Every index that a caller gives is checked before it is used.
  void require_rank(const char* operation, int rank) const;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return shape_.size; }
  const Shape& shape() const noexcept { return shape_; }

  // Arrives at the next step and waits until all have. Throws kPeerLost, kTimeout, or what poll throws; after
  // that the group is broken: the other ranks' waits and all later calls fail with the same cause.
  void synchronize(const Operation& operation);

  // The first step of a collective; also compares the calls. Throws kMismatch on every rank, naming the
  // difference, if they are not equal; the group stays usable.
  void synchronize(const Operation& operation, const Call& call);

  // The same for collectives where each pair has its own size: `sends[i]` bytes go to rank i, `receives[i]`
  // come from it. Returns the largest block of any pair, in bytes.
  std::size_t synchronize(const Operation& operation, const Call& call, const std::vector<std::size_t>& sends,
                          const std::vector<std::size_t>& receives);

  // For messages between two ranks: each rank has a counter that others advance when they write to or read
  // from one of its mailboxes.
  std::uint32_t mail() const noexcept;
  void notify(int peer) noexcept;
  // Waits for mail() to change from `seen`, for at most a slice of time.
  void await_mail(std::uint32_t seen, Patience patience) noexcept;
  std::byte* mailbox(int from, int to) const noexcept;

  // Throws if `peer` cannot arrive: the group failed, `peer` has left or died and has not arrived before, or
  // poll throws.
  void look_after(const Operation& operation, int peer, const std::function<bool()>& has_arrived = {});
  bool has_left(int rank) const noexcept;

  // Memory for what this rank publishes in the next step, at most slot_bytes; call it once per step.
  std::byte* next_slot(std::size_t size_bytes) noexcept;
  // The same for what it reduced: at most its share of a slot, the part of one rank.
  std::byte* next_result(std::size_t size_bytes) noexcept;
  // What `rank` published in the last step.
  const std::byte* slot(int rank) const noexcept;
  const std::byte* result(int rank) const noexcept;

  std::uint64_t waiting_ns() const noexcept { return waiting_ns_.load(std::memory_order_relaxed); }
  int name_of(int rank) const noexcept { return names_[static_cast<std::size_t>(rank)]; }

  // Marks the group as failed, wakes the others, and throws.
  [[noreturn]] void fail(Code code, const std::string& message, int culprit);

  // Breaks the group for a reason that lies outside it: all ranks' waits and later calls throw `code` with
  // this message (cut after kMaxReason bytes) and the first kMaxReasonNames of these names of ranks.
  // Thread-safe. The first failure counts.
  void report(Code code, const std::string& message, const std::vector<int>& names) noexcept;

  // Throws if the group has failed, or if a rank that has not left it has died.
  void check(const Operation& operation);
  void throw_if_broken(const Operation& operation);

 private:
  struct RankState;
  struct Head;

  // Offsets and lengths of the parts of the segment, in bytes.
  struct Layout {
    std::size_t tables, mailboxes, slots, slot_ring, results, result_ring, total;
  };

  static Layout layout(const Shape& shape);
  static std::size_t index(int rank) noexcept { return static_cast<std::size_t>(rank); }
  Head& head() const noexcept;
  RankState& state(int rank) const noexcept;
  std::byte* slots(int rank) const noexcept {
    return memory_.data() + at_.slots + index(rank) * at_.slot_ring;
  }
  std::byte* results(int rank) const noexcept {
    return memory_.data() + at_.results + index(rank) * at_.result_ring;
  }
  std::uint64_t* table(int rank) const noexcept;
  void arrive_and_wait(const Operation& operation);
  // Whether the peer ran on this rank's core when it last arrived: then a waiting rank must yield.
  bool shares_core(int peer) const noexcept;
  void spread_out(Patience patience);
  void wait_for_rank(const Operation& operation, int peer, std::uint32_t target);
  void hear_failure(const Operation& operation);
  bool claim_failure() noexcept;
  void wake_all() noexcept;
  void set_broken(Code code, const std::string& message, const std::vector<int>& names);
  bool is_dead(int peer) const noexcept;
  [[noreturn]] void lose(const Operation& operation, int peer, bool has_left);
  void compare_calls(const Operation& operation, const Call& mine);
  std::vector<int> missing(std::uint32_t target) const;
  std::string prefix(const Operation& operation) const;

  SharedMemory memory_;
  Shape shape_;
  int rank_;
  std::vector<int> names_;
  Layout at_;
  std::size_t slot_cursor_ = 0;
  std::size_t result_cursor_ = 0;
  std::uint32_t step_ = 0;
  std::uint32_t call_count_ = 0;
  std::mutex broken_lock_;
  std::atomic<bool> broken_{false};
  Code broken_code_ = Code::kPeerLost;
  std::string broken_why_;
  std::vector<int> broken_ranks_;
  std::atomic<bool> left_{false};
  std::atomic<std::uint64_t> waiting_ns_{0};
};

}  // namespace torchrelay
