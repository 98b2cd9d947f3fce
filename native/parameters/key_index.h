// The entry of each key. Of a dense table it is the key itself; a dynamic table makes entries at first use,
// and evicts when full.
//
// Finding takes no lock. Making and removing keys takes the index lock. An entry never moves, so its lock can
// be taken safely; its taker checks that the entry still is the key's.
#pragma once

#include <vector>

#include "parameters/rows.h"

namespace torchrelay::parameters {

// A key that this node owned far from its home and has evicted; or one of this home that has moved away.
struct Moved {
  std::int64_t key;
  std::uint32_t node;  // its home; or where it is
  std::uint32_t epoch;
};

class KeyIndex {
 public:
  KeyIndex(Slab& slab, Rows& rows) : slab_(slab), header_(slab.header()), keys_(slab.keys()), rows_(rows) {}

  // The index of the key's entry, or -1.
  std::int64_t find(std::int64_t key) const { return keys_ == nullptr ? key : probe(key); }
  // The same; makes an entry where there is none. Throws kUnavailable if the table is full; -1 if it is.
  std::int64_t find_or_make(std::uint32_t user_id, std::int64_t key);
  std::int64_t find_or_try_make(std::uint32_t user_id, std::int64_t key);
  // Evicts a row if there is no free slot. Throws kUnavailable if none can go.
  void take_slot(LockedEntry& entry);

  std::vector<std::int64_t> owned_keys() const;
  // Whether all of `keys` can be read here.
  bool holds(const std::int64_t* keys, std::size_t count) const;

  // Replaces each of `keys` by the nearest one of [low, high) whose row is here, not lent; with `distinct`,
  // by one that is neither in `taken` (sorted) nor was chosen before. `drawable` says of each key of the
  // range whether it may be chosen (0: no); null: all may. Stops where there is none; returns how many were
  // replaced.
  std::size_t nearest_local(std::int64_t* keys, std::size_t count, std::int64_t low, std::int64_t high,
                            const std::vector<std::int64_t>& taken, bool distinct,
                            const std::uint8_t* drawable = nullptr) const;

  // --- dynamic tables ---
  // Whether most keys that can be remembered are there.
  bool tight(std::uint32_t user_id);
  // Looks at `places` entries from `cursor` on and removes the rows of `channel` that have moved here, and
  // that nobody has used since the last look; their homes must be notified.
  std::vector<Moved> evict_moved(std::uint32_t user_id, std::uint32_t channel, std::uint64_t& cursor,
                                 std::uint64_t places);
  // Keys of this home and channel that are elsewhere, among `places` entries from `cursor` on.
  std::vector<Moved> moved_away(std::uint32_t channel, std::uint64_t& cursor, std::uint64_t places) const;
  // Removes a key of this home that had moved and was evicted where it was.
  void forget(LockedEntry& entry, std::uint32_t epoch);

 private:
  std::int64_t probe(std::int64_t key) const;
  std::int64_t make(std::uint32_t user_id, std::int64_t key);
  std::int64_t try_make(std::uint32_t user_id, std::int64_t key);
  // With the index lock held.
  bool evict_one(std::uint32_t user_id);
  void remove(LockedEntry& entry);
  [[noreturn]] void throw_full() const;

  Slab& slab_;
  SlabHeader& header_;
  std::atomic<std::int64_t>* keys_;  // null: dense
  Rows& rows_;
};

}  // namespace torchrelay::parameters
