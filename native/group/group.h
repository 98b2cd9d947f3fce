// One rank's part in a group of ranks, of one host or of several: collectives in the order of their calls,
// and messages between two ranks.
//
// The ranks of a host share a segment (shared_group.h). connect() makes the group one of several hosts, with
// TCP between them (host_collectives.h). In a forked child every call is refused, and closing does
// nothing.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/origin.h"
#include "group/collectives.h"
#include "group/executor.h"
#include "group/host_collectives.h"
#include "group/mailboxes.h"
#include "group/messenger.h"
#include "group/shared_group.h"

namespace torchrelay {

// Thread-safe, but for the constructor, join() and connect().
class Group {
 public:
  using Pending = std::shared_ptr<Ticket>;
  using Timeout = std::chrono::nanoseconds;

  struct Waiting {
    Timeout spin{0}, yield{0};         // it yields only if more ranks than cores have joined
    std::function<void()> interrupts;  // called 20 times a second by callers that wait; throws to stop
  };

  Group(SharedMemory memory, int rank, std::vector<int> names, Waiting waiting);
  ~Group() { close(); }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Waits until all ranks of this host have registered.
  void join(Timeout timeout);

  // Makes this rank one of a group of several hosts; `hosts.rank` is its rank there. `on_failure` is called
  // once, in any thread, when the group breaks here or a peer reports that it broke.
  void connect(MessengerOptions options, Descriptor listener, Hosts hosts,
               std::function<void(const Error&)> on_failure);

  // Runs a collective here, and returns null, if it may block and nothing is queued; else queues it. Several
  // are one call: none begins before all ranks have agreed on all of them.
  Pending run(std::span<const Collective> calls, Timeout timeout, bool may_block);

  std::shared_ptr<Transfer> send(Block data, int to, std::int64_t tag, std::uint8_t code, Timeout timeout);
  // From any rank if `source` is kAnyRank.
  std::shared_ptr<Transfer> receive(Block data, int source, std::int64_t tag, std::uint8_t code,
                                    Timeout timeout);
  // False: it is not done within `timeout`.
  bool wait(const std::shared_ptr<Transfer>& transfer, Timeout timeout);

  // Breaks the group on all ranks; the first failure counts.
  void report(const Error& error);
  // Throws if the group has failed or a rank of this host has died.
  void check(const char* operation);
  // Fails what is in progress, and leaves. Idempotent.
  void close();

  // Of a group of several hosts.
  Messenger& messenger();
  std::uint64_t calls() const noexcept { return calls_.load(std::memory_order_relaxed); }
  // The calls that have ended without an error.
  std::uint64_t completed() const noexcept { return completed_.load(std::memory_order_relaxed); }
  std::uint64_t payload_bytes() const noexcept { return payload_bytes_.load(std::memory_order_relaxed); }
  std::uint64_t shared_ns() const noexcept { return parts_->group.waiting_ns(); }
  std::uint64_t shared_bytes() const noexcept { return hosts_ ? hosts_->shared_bytes() : 0; }

 private:
  struct Parts {
    Parts(SharedMemory memory, int rank, std::vector<int> names)
        : group(std::move(memory), rank, std::move(names)), mailboxes(group) {}

    SharedGroup group;
    Executor executor;
    Mailboxes mailboxes;
  };

  Operation begin(const char* name, Timeout timeout, bool in_background);
  void perform(std::span<const Collective> calls, const Operation& operation);
  void abandon(const Ticket& ticket, const char* name);
  int index_here(int rank) const;
  void refuse_in_child(const char* operation) const;

  ProcessOwned<Parts> parts_;
  const Origin origin_;
  const Waiting waiting_;
  Patience patience_;
  ProcessOwned<Messenger> messenger_;  // null: all ranks are on this host
  std::optional<HostGroup> hosts_;
  std::vector<int> here_;  // the ranks of this host
  std::mutex failure_lock_;
  std::function<void(const Error&)> on_failure_;
  std::atomic<std::uint32_t> local_tags_{0};
  std::atomic<std::uint64_t> calls_{0}, completed_{0}, payload_bytes_{0};
  std::atomic<bool> closed_{false};
};

}  // namespace torchrelay
