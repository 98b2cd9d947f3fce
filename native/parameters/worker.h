// A worker's access to the whole table: keys of its node through the slab, others by asking their owners.
//
// Used by one thread at a time. Answers are taken in inside the worker's own calls, never by another thread,
// so the caller's buffers are written only while the caller is inside. Each buffer of an asynchronous call is
// held until the call is finished.
//
// Order: a worker's operations on one key take effect in the order it made them, asynchronous ones too. As
// they may take different ways, one waits, before it begins, for unfinished ones on its keys that it must not
// overtake; pushes that are added overtake each other.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/origin.h"
#include "parameters/reliable_endpoint.h"
#include "parameters/store.h"
#include "parameters/unfinished_keys.h"

namespace torchrelay::parameters {

// Addresses of all channels: addresses[node * num_channels + channel].
using ChannelAddresses = std::vector<std::string>;

struct WorkerOptions {
  std::chrono::milliseconds timeout{300000};
  std::size_t max_unfinished = 1024;  // operations; a further one first waits for another to end
  std::size_t max_message_bytes = std::size_t{1} << 30;  // see NetworkOptions
};

class Worker {
 public:
  using Interrupt = std::function<void()>;  // called now and then while waiting; may throw

  // `network` may be null where there is one node. Throws kArgument if the worker id is taken.
  Worker(std::shared_ptr<Store> store, std::uint32_t worker_id, std::shared_ptr<Network> network,
         const ChannelAddresses& addresses, const WorkerOptions& options, Interrupt interrupt);
  ~Worker();  // ends the intents; in a forked child, it does nothing
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Reads or writes the keys' rows in `values`, `size_bytes` long. Returns -1 if all is done, else a
  // timestamp. `holder` keeps keys and values alive until then.
  std::int64_t access(Op op, const std::int64_t* keys, std::size_t count, std::byte* values,
                      std::size_t size_bytes, std::shared_ptr<void> holder);
  // Blocks until all is done. If it throws, what is answered later is not written to `values`.
  void access_and_wait(Op op, const std::int64_t* keys, std::size_t count, std::byte* values,
                       std::size_t size_bytes);
  // False, and nothing is asked of other nodes, unless all keys are here.
  bool pull_if_local(const std::int64_t* keys, std::size_t count, std::byte* values, std::size_t size_bytes);

  void wait(std::int64_t timestamp);
  void wait_all();
  bool is_finished(std::int64_t timestamp);
  std::size_t unfinished() const { return pending_.size(); }

  // Announces accesses to `keys` in the clocks [start, end).
  void intent(const std::int64_t* keys, std::size_t count, std::int64_t start, std::int64_t end);
  std::int64_t advance_clock();
  std::int64_t clock() const;

  // Until this node's updates have reached their owners, and then all replicas of all nodes have what the
  // owners have.
  void wait_sync();

  // No more accesses; intents end. Finishes what is unfinished first. Nothing in a forked child.
  void finalize();

 private:
  struct Pending {
    Op op;
    std::vector<std::int64_t> keys;     // those that were missed, in the order of the request
    std::vector<std::byte*> places;     // where each one's value lies; none: the caller has given up
    std::vector<std::uint32_t> epochs;  // how recent the knowledge was by which each was sent
    std::size_t remaining;
    std::shared_ptr<void> holder;
    bool counted = false;  // in unfinished_keys_
  };
  struct Answer {
    std::uint32_t count;  // of keys that were asked for
    Message message;
  };

  void check_size(Op op, const std::int64_t* keys, std::size_t count, std::size_t size_bytes) const;
  std::int64_t ask_owners(Op op, const std::int64_t* keys, std::size_t count, std::byte* values,
                          std::shared_ptr<void> holder);
  void drop_overwritten(const std::int64_t* keys, std::size_t count);
  void send_request(std::int64_t request_id, const Pending& pending, std::uint32_t destination,
                    std::span<const std::uint32_t> positions, std::size_t value_bytes);
  void take_answer(const Answer& answer);
  bool is_early(const Pending& pending, const std::uint32_t* positions, std::size_t count) const;
  bool take_early_answers();
  void learn(std::int64_t key, std::uint32_t owner, std::uint32_t epoch);
  bool receive(std::chrono::microseconds timeout);
  void wait_until(const std::function<bool()>& done, const char* what);
  UnfinishedKeys::Class class_of(Op op) const;
  void settle(Op op, const std::int64_t* keys, std::size_t count);
  void count_unfinished_keys();
  void finish(std::int64_t request_id);
  void look_at_leader();
  void count_traffic();

  std::shared_ptr<Store> store_;
  std::uint32_t user_id_;
  WorkerOptions options_;
  Interrupt interrupt_;
  std::shared_ptr<Network> network_;         // outlives the endpoint
  ProcessOwned<ReliableEndpoint> endpoint_;  // null: one node
  std::unordered_map<std::int64_t, Pending> pending_;
  std::int64_t next_request_id_ = 0;
  std::uint64_t first_wire_id_ = 0;  // added to ids in messages
  std::vector<Answer> early_;        // waiting for the end of a replica
  bool is_leader_;                   // of its node: the process that serves it
  std::chrono::steady_clock::time_point next_look_{};
  std::vector<Missed> missed_;
  std::vector<std::vector<std::uint32_t>> by_destination_;  // positions in a Pending
  UnfinishedKeys unfinished_keys_;
  std::int64_t first_uncounted_ = 0;  // operations from here on are not in unfinished_keys_
  std::size_t num_others_ = 0;        // unfinished operations that are not of class kAdd
  Origin origin_;
  bool finalized_ = false;
};

}  // namespace torchrelay::parameters
