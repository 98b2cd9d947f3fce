// A node's part of the table: rows in a slab that all processes of the node map.
//
// Any process may pull, push and set; each key's row is accessed under its entry's lock, so an access is
// atomic per key. Nothing here blocks longer than another's access, and other nodes are known only as ids in
// entries. A key whose row is not here is reported as missed, and left to the caller.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torchrelay/parameters/mark_set.h"
#include "torchrelay/parameters/slab.h"
#include "torchrelay/shared_memory.h"

namespace torchrelay::parameters {

enum class InitKind : std::uint32_t { kZeros, kConstant, kUniform, kNormal };
inline constexpr const char* kInitNames[] = {"zeros", "constant", "uniform", "normal"};

// The initial value of a key: a function of the key and the seed alone.
struct KeyInit {
  InitKind kind = InitKind::kZeros;
  double a = 0;
  double b = 0;
  std::uint64_t seed = 0;
};

struct StoreSpec {
  std::vector<std::uint32_t> lengths;  // one for all keys, or one per key
  std::uint64_t num_keys = 0;          // 0: keys are made at first use
  std::uint64_t capacity = 0;          // dynamic: rows this node can hold
  Dtype dtype = Dtype::kFloat32;
  UpdateRule rule;
  KeyInit init;
  std::uint32_t node = 0, num_nodes = 1, num_channels = 1;
};

enum class Op : std::uint8_t { kPull, kPush, kSet, kPullRow, kSetRow };
inline constexpr const char* kOpNames[] = {"pull", "push", "set", "pull_rows", "set_rows"};

constexpr bool reads(Op op) { return op == Op::kPull || op == Op::kPullRow; }
constexpr bool sets(Op op) { return op == Op::kSet || op == Op::kSetRow; }
constexpr bool whole_row(Op op) { return op == Op::kPullRow || op == Op::kSetRow; }

// A key of a batch that could not be served here.
struct Missed {
  std::uint32_t index;  // in the batch
  std::uint32_t owner;  // the node to ask
  std::uint32_t epoch;  // of that owner lookup
};

// A key that this node owned far from its home and has evicted; or one of this home that has moved away.
struct Moved {
  std::int64_t key;
  std::uint32_t node;  // its home; or where it is
  std::uint32_t epoch;
};

// Where a batch's values lie, one key's after another's: read by an operation that writes rows, written by
// one that reads them.
struct Values {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
};
inline Values values_for(Op op, std::byte* values) {
  return reads(op) ? Values{.to = values} : Values{.from = values};
}

class LockedEntry;

class Store {
 public:
  // A new slab; this process becomes the node's leader.
  static Store create(const StoreSpec& spec);
  // The slab of another process of this host. `init` must be the creator's.
  static Store attach(const std::string& address, const KeyInit& init);

  std::string address() const { return memory_.address(); }
  SlabHeader& header() { return *header_; }
  const SlabHeader& header() const { return *header_; }
  User* users() { return users_; }
  const User* users() const { return users_; }
  bool dynamic() const { return header_->num_keys == 0; }
  std::uint32_t home_of(std::int64_t key) const {
    return static_cast<std::uint32_t>(static_cast<std::uint64_t>(key) % header_->num_nodes);
  }
  std::uint32_t channel_of(std::int64_t key) const {
    if (header_->num_channels == 1) return 0;
    return static_cast<std::uint32_t>(static_cast<std::uint64_t>(key) / header_->num_nodes %
                                      header_->num_channels);
  }

  // Takes a user id; frees the locks its dead predecessor held. Throws kArgument if it is in use.
  void take_user(std::uint32_t user_id);
  void leave_user(std::uint32_t user_id);

  // Bytes a batch's values take. Throws kArgument, naming the first key that is out of range.
  std::size_t value_bytes(Op op, const std::int64_t* keys, std::size_t count) const;
  std::size_t value_bytes(Op op, std::int64_t key) const;
  std::uint32_t length_of(std::int64_t key) const;
  bool valid(std::int64_t key) const;

  // Serves the keys whose rows are here; appends the others to `missed`. `values` is read or written at the
  // keys served.
  void access(Op op, std::uint32_t user_id, const std::int64_t* keys, std::size_t count, Values values,
              std::vector<Missed>& missed);

  // --- for channels ---
  // The same for the master copies only; appends the indices of those that other nodes hold replicas of.
  void access_owned(Op op, std::uint32_t user_id, const std::int64_t* keys, std::size_t count, Values values,
                    std::vector<Missed>& missed, std::vector<std::uint32_t>& shared);
  // The index of the key's entry, or -1.
  std::int64_t find(std::int64_t key) const;
  // The same; makes an entry where there is none. Throws kUnavailable if the table is full; -1 if it is.
  std::int64_t find_or_make(std::uint32_t user_id, std::int64_t key);
  std::int64_t find_or_try_make(std::uint32_t user_id, std::int64_t key);
  Entry& entry(std::int64_t entry_index) { return entries_[entry_index]; }
  const Entry& entry(std::int64_t entry_index) const { return entries_[entry_index]; }
  // The entries of a channel, counted from 0: a dense table's keys are dealt to channels in runs of num_nodes
  // (see channel_of); of a dynamic table, any channel may have any entry.
  std::uint64_t index_in_channel(std::int64_t entry_index) const {
    const std::uint64_t nodes = header_->num_nodes, channels = header_->num_channels;
    const auto key = static_cast<std::uint64_t>(entry_index);
    return dynamic() ? key : key / (nodes * channels) * nodes + key % nodes;
  }
  std::int64_t entry_in_channel(std::uint32_t channel, std::uint64_t index) const {
    const std::uint64_t nodes = header_->num_nodes, channels = header_->num_channels;
    const std::uint64_t key = index / nodes * nodes * channels + channel * nodes + index % nodes;
    return static_cast<std::int64_t>(dynamic() ? index : key);
  }
  // Entries of the channel that a round must visit: a replica has something to send, or a shared key
  // something that its replicas lack. Marked, under the entry's lock, before the entry shows it.
  MarkSet changed(std::uint32_t channel) const {
    return {memory_.data() + header_->changed_offset + channel * header_->changed_bytes,
            header_->channel_entries};
  }
  std::int64_t key_of(std::int64_t entry_index) const {
    return dynamic() ? keys_[entry_index].load() : entry_index;
  }
  // The epoch of the entry's owner; set by LockedEntry::set_owner.
  std::uint32_t ownership_epoch(std::int64_t entry_index,
                                std::memory_order order = std::memory_order_relaxed) const {
    return epochs_[entry_index].load(order);
  }
  void prefetch_location(std::int64_t key) const {
    if (!dynamic()) __builtin_prefetch(&epochs_[key]);
  }
  const ClassInfo& class_of(std::int64_t entry_index) const { return classes_[class_index(entry_index)]; }
  // Dynamic tables: seven eighths of the rows that fit are there; of the keys that can be remembered.
  bool rows_tight(std::uint32_t user_id);
  bool keys_tight(std::uint32_t user_id);
  // Looks at `places` entries from `cursor` on and removes the rows of `channel` that have moved here, and
  // that nobody has used since the last look; their homes must be notified.
  std::vector<Moved> evict_moved(std::uint32_t user_id, std::uint32_t channel, std::uint64_t& cursor,
                                 std::uint64_t places);
  // Keys of this home and channel that are elsewhere, among `places` entries from `cursor` on.
  std::vector<Moved> moved_away(std::uint32_t channel, std::uint64_t& cursor, std::uint64_t places) const;
  // Removes a key of this home that had moved and was evicted where it was.
  void forget(LockedEntry& entry, std::uint32_t epoch);
  // A taken slot's row holds anything; its accumulator holds zeros.
  void take_slot(LockedEntry& entry);
  void free_slot(LockedEntry& entry);
  void initialize_row(LockedEntry& entry, std::int64_t key);
  // One push of `length` elements onto the row, by the table's rule.
  void apply(std::byte* row, const std::byte* pushed, std::uint32_t length) const;
  void count(std::uint32_t user_id, Stat stat, std::uint64_t amount) {
    auto& cell = header_->stats[user_id][stat];  // one writer
    cell.store(cell.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  }
  // Over all users.
  std::uint64_t total(Stat stat) const;
  std::vector<std::int64_t> owned_keys() const;
  // Replaces each of `keys` by the nearest one of [low, high) whose row is here; with `distinct`, by one that
  // is neither in `taken` (sorted) nor was chosen before. `drawable` says of each key of the range whether it
  // may be chosen (0: no); null: all may. Stops where there is none; returns how many were replaced.
  std::size_t nearest_local(std::int64_t* keys, std::size_t count, std::int64_t low, std::int64_t high,
                            const std::vector<std::int64_t>& taken, bool distinct,
                            const std::uint8_t* drawable = nullptr) const;
  // A channel has failed; the first reason is kept.
  void fail(Code code, const char* reason);
  // Makes every process of every node raise, and name the loss, unless there was one before.
  void lose(const Loss& loss);
  Loss loss() const { return header_->loss.load(std::memory_order_acquire); }
  // This process leaves while others still use the table.
  void leave_in_need();
  // The process of a dead worker of this node has no successor.
  void lose_worker(std::uint32_t worker);
  // Whether this node should stop serving.
  bool is_stopping() const {
    const Loss lost = loss();
    return header_->stopping.load(std::memory_order_relaxed) != 0 ||
           (lost.how != Loss::kNone && lost.node == header_->node);
  }
  // Throws kPeerLost or kUnavailable if the table cannot be used any more.
  void check_peers() const;
  // The same, and that this node's leader lives; costs a read in /proc.
  void check_leader() const;
  // Workers of this node whose processes have died without leaving; successors may take their ids.
  std::vector<std::uint32_t> dead_workers() const;

 private:
  friend class LockedEntry;

  // A batch of keys that is accessed.
  struct Batch {
    Op op;
    std::uint32_t user_id;
    const std::int64_t* keys;
    std::size_t count;
    Values values;
    std::vector<Missed>& missed;
    std::vector<std::uint32_t>* shared;  // null: replicas serve too
  };

  Store(SharedMemory memory, const KeyInit& init);
  void map();
  std::uint32_t class_index(std::int64_t entry_index) const {
    return class_of_ == nullptr ? 0 : class_of_[entry_index];
  }
  std::int64_t make(std::uint32_t user_id, std::int64_t key);
  std::int64_t try_make(std::uint32_t user_id, std::int64_t key);
  // With the index lock held.
  bool evict_one(std::uint32_t user_id);
  void remove(LockedEntry& entry);
  bool take_free_slot(LockedEntry& entry);
  [[noreturn]] void throw_full() const;
  [[noreturn]] void throw_loss(const Loss& loss) const;
  bool is_own_leave(const Loss& loss) const;
  void raise_and_mark(LockedEntry& entry, Flag flag);
  void access_batch(const Batch& batch);
  // Serves the batch's i-th key, whose values lie `offset` bytes from the start, or reports it as missed.
  // False if the entry has become another key's meanwhile.
  bool access_entry(const Batch& batch, std::size_t i, std::int64_t entry_index, std::size_t offset);
  // The same for a key of which no entry was found, or an entry that has become another key's: looks again.
  void access_unfound(const Batch& batch, std::size_t i, std::size_t offset);
  bool known_absent(std::int64_t entry_index, std::size_t index, std::vector<Missed>& missed) const;
  std::int64_t find_to_access(const Batch& batch, std::int64_t key);
  [[noreturn]] void throw_out_of_range(const std::int64_t* keys, std::size_t count) const;

  SharedMemory memory_;
  KeyInit init_;
  SlabHeader* header_;
  User* users_;
  ClassInfo* classes_;
  Pool* pools_;
  Entry* entries_;
  std::atomic<std::uint32_t>* epochs_;
  std::uint16_t* class_of_;          // null: one class
  std::atomic<std::int64_t>* keys_;  // null: dense
};

}  // namespace torchrelay::parameters
