// An entry whose lock is held: what changes an entry or its row takes one of these.
//
// Only a LockedEntry leads to the row, so nothing can read or write a row without its lock.
#pragma once

#include <mutex>

#include "parameters/slab.h"

namespace torchrelay::parameters {

class LockedEntry {
 public:
  // Blocks until the lock is free, or its holder has died.
  LockedEntry(Slab& slab, std::int64_t entry_index, std::uint32_t user_id)
      : slab_(slab),
        entry_(slab.entry(entry_index)),
        index_(entry_index),
        user_id_(user_id),
        guard_(entry_.lock, slab.users(), user_id) {}
  // Without waiting; owns() reports whether the lock is held.
  LockedEntry(Slab& slab, std::int64_t entry_index, std::uint32_t user_id, std::try_to_lock_t)
      : slab_(slab),
        entry_(slab.entry(entry_index)),
        index_(entry_index),
        user_id_(user_id),
        guard_(entry_.lock, user_id, std::try_to_lock) {}

  bool owns() const { return guard_.owns(); }
  Entry* operator->() const { return &entry_; }

  std::int64_t index() const { return index_; }
  std::uint32_t user_id() const { return user_id_; }
  std::int64_t key() const { return slab_.key_of(index_); }
  std::uint32_t epoch() const { return slab_.ownership_epoch(index_); }
  // The owner first: readers without the lock read the epoch first, and must not pair an old owner with the
  // new epoch.
  void set_owner(std::uint32_t node, std::uint32_t epoch) {
    entry_.owner = static_cast<std::uint16_t>(node);
    slab_.epochs_[index_].store(epoch, std::memory_order_release);
  }

  const ClassInfo& row_class() const { return slab_.class_of(index_); }
  std::size_t value_bytes() const { return row_class().length * size_bytes(slab_.header().dtype); }
  std::size_t row_bytes() const { return row_class().row_length * size_bytes(slab_.header().dtype); }
  std::byte* row() const { return slot_in(row_class().rows_offset); }
  std::byte* accumulator() const { return slot_in(row_class().accumulators_offset); }
  // One push onto the row, by the table's rule.
  void apply(const std::byte* pushed) {
    const SlabHeader& header = slab_.header();
    if (header.rule.kind == RuleKind::kAdd) return add(header.dtype, row(), pushed, row_class().length);
    UpdateRule rule = header.rule;
    rule.learning_rate = header.learning_rate.load(std::memory_order_relaxed);
    rule.step = header.step.load(std::memory_order_relaxed);
    rule.apply(header.dtype, row(), pushed, row_class().length);
  }

 private:
  std::byte* slot_in(std::uint64_t offset) const {
    return slab_.at(offset + row_class().stride_bytes * entry_.slot.load(std::memory_order_relaxed));
  }

  Slab& slab_;
  Entry& entry_;
  std::int64_t index_;
  std::uint32_t user_id_;
  LockGuard guard_;
};

// Calls `action` with the entry of `key`, locked. Looks again if the entry has become another key's
// meanwhile. False if `find` finds no entry (-1).
template <typename Find, typename Action>
bool with_locked(Slab& slab, std::int64_t key, std::uint32_t user_id, const Find& find,
                 const Action& action) {
  for (;;) {
    const std::int64_t entry_index = find();
    if (entry_index < 0) return false;
    LockedEntry entry(slab, entry_index, user_id);
    if (entry.key() != key) continue;
    action(entry);
    return true;
  }
}

}  // namespace torchrelay::parameters
