// Which slots of a slab hold rows, and what a new row holds.
#pragma once

#include "parameters/locked_entry.h"

namespace torchrelay::parameters {

// Seven eighths of what a dynamic table has.
constexpr bool is_mostly_used(std::uint64_t used, std::uint64_t capacity) {
  return used >= capacity - capacity / 8;
}

class Rows {
 public:
  Rows(Slab& slab, const KeyInit& init) : slab_(slab), init_(init) {}

  // A taken slot's row holds anything; its accumulator holds zeros. False if there is none.
  bool try_take_slot(LockedEntry& entry);
  void free_slot(LockedEntry& entry);
  // Dynamic tables: whether most slots are taken.
  bool tight(std::uint32_t user_id);
  void initialize(LockedEntry& entry, std::int64_t key);
  // Gives the keys that are at home here their rows, if the table is new and dense.
  void initialize_dense();

 private:
  std::uint32_t* free_slots(std::uint32_t class_index) const;

  Slab& slab_;
  KeyInit init_;
};

}  // namespace torchrelay::parameters
