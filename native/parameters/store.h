// A node's part of the table: rows in a slab that all processes of the node map.
//
// Any process may pull, push and set; each key's row is accessed under its entry's lock, so an access is
// atomic per key. Nothing here blocks longer than another's access. A key whose row is not here is reported
// as missed, and left to the caller.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "parameters/key_index.h"
#include "parameters/membership.h"
#include "parameters/rows.h"
#include "parameters/slab.h"

namespace torchrelay::parameters {

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

// Where a batch's values lie, one key's after another's: read by an operation that writes rows, written by
// one that reads them.
struct Values {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
};
inline Values values_for(Op op, std::byte* values) {
  return reads(op) ? Values{.to = values} : Values{.from = values};
}

class Store : public Slab {
 public:
  // A new slab; this process becomes the node's leader.
  static std::shared_ptr<Store> create(const StoreSpec& spec);
  // The slab of another process of this host. `init` must be the creator's.
  static std::shared_ptr<Store> attach(const std::string& address, const KeyInit& init);

  Rows& rows() { return rows_; }
  KeyIndex& index() { return index_; }
  const KeyIndex& index() const { return index_; }
  Membership& membership() { return membership_; }

  // Bytes a batch's values take. Throws kArgument, naming the first key that is out of range.
  std::size_t value_bytes(Op op, const std::int64_t* keys, std::size_t count) const;
  std::size_t value_bytes(Op op, std::int64_t key) const;

  // Serves the keys whose rows are here; appends the others to `missed`. `values` is read or written at the
  // keys served.
  void access(Op op, std::uint32_t user_id, const std::int64_t* keys, std::size_t count, Values values,
              std::vector<Missed>& missed);
  // For channels: the same for the master copies only; appends the indices of those that other nodes hold
  // replicas of.
  void access_owned(Op op, std::uint32_t user_id, const std::int64_t* keys, std::size_t count, Values values,
                    std::vector<Missed>& missed, std::vector<std::uint32_t>& shared);

 private:
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

  Store(Slab slab, const KeyInit& init);
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

  Rows rows_;
  KeyIndex index_;
  Membership membership_;
};

}  // namespace torchrelay::parameters
