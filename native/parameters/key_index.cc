#include "parameters/key_index.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <unordered_set>

#include "core/error.h"
#include "parameters/mix.h"

namespace torchrelay::parameters {
namespace {

constexpr auto kRoomWait = std::chrono::seconds(1);
constexpr auto kRoomPoll = std::chrono::milliseconds(1);

}  // namespace

std::int64_t KeyIndex::find_or_make(std::uint32_t user_id, std::int64_t key) {
  const std::int64_t entry_index = find(key);
  return entry_index >= 0 ? entry_index : make(user_id, key);
}

std::int64_t KeyIndex::find_or_try_make(std::uint32_t user_id, std::int64_t key) {
  const std::int64_t entry_index = find(key);
  return entry_index >= 0 ? entry_index : try_make(user_id, key);
}

void KeyIndex::take_slot(LockedEntry& entry) {
  while (!rows_.try_take_slot(entry)) {
    const LockGuard guard(header_.index_lock, slab_.users(), entry.user_id());
    if (!evict_one(entry.user_id())) throw_full();
  }
}

std::vector<std::int64_t> KeyIndex::owned_keys() const {
  std::vector<std::int64_t> keys;
  for (std::uint64_t i = 0; i < header_.num_entries; ++i) {
    const auto entry_index = static_cast<std::int64_t>(i);
    if (slab_.entry(entry_index).state == State::kOwned) keys.push_back(slab_.key_of(entry_index));
  }
  return keys;
}

bool KeyIndex::holds(const std::int64_t* keys, std::size_t count) const {
  return std::all_of(keys, keys + count, [this](std::int64_t key) {
    const std::int64_t entry_index = find(key);
    if (entry_index < 0) return false;
    const Entry& entry = slab_.entry(entry_index);
    return entry.slot.load(std::memory_order_relaxed) != kNoSlot &&
           !(entry.has(kLent) && entry.has(kDirty | kLeaving));
  });
}

std::size_t KeyIndex::nearest_local(std::int64_t* keys, std::size_t count, std::int64_t low,
                                    std::int64_t high, const std::vector<std::int64_t>& taken, bool distinct,
                                    const std::uint8_t* drawable) const {
  std::unordered_set<std::int64_t> used(taken.begin(), taken.end());
  const auto usable = [&](std::int64_t key) {
    if (key < low || key >= high || (drawable != nullptr && drawable[key - low] == 0)) return false;
    const std::int64_t entry_index = find(key);
    if (entry_index < 0) return false;
    const Entry& entry = slab_.entry(entry_index);
    return entry.slot.load(std::memory_order_relaxed) != kNoSlot && !entry.has(kLent) && !used.contains(key);
  };
  for (std::size_t i = 0; i < count; ++i) {
    std::int64_t distance = 0;
    const std::int64_t farthest = std::max(keys[i] - low, high - 1 - keys[i]);
    while (distance <= farthest && !usable(keys[i] - distance) && !usable(keys[i] + distance)) ++distance;
    if (distance > farthest) return i;
    keys[i] += usable(keys[i] - distance) ? -distance : distance;
    if (distinct) used.insert(keys[i]);
  }
  return count;
}

bool KeyIndex::tight(std::uint32_t user_id) {
  const LockGuard guard(header_.index_lock, slab_.users(), user_id);
  return is_mostly_used(header_.live_entries, header_.num_entries / 2);
}

std::vector<Moved> KeyIndex::evict_moved(std::uint32_t user_id, std::uint32_t channel, std::uint64_t& cursor,
                                         std::uint64_t places) {
  std::vector<Moved> evicted;
  const LockGuard guard(header_.index_lock, slab_.users(), user_id);
  for (std::uint64_t turn = 0; turn < places; ++turn) {
    const std::uint64_t place = cursor++ & (header_.num_entries - 1);
    const std::int64_t key = keys_[place].load(std::memory_order_relaxed);
    if (key <= kTombstone || header_.home_of(key) == header_.node || header_.channel_of(key) != channel)
      continue;
    LockedEntry entry(slab_, static_cast<std::int64_t>(place), user_id, std::try_to_lock);
    if (!entry.owns()) continue;
    if (entry->state == State::kOwned && !entry->has(kShared | kUsed | kPinned)) {
      evicted.push_back({.key = key, .node = header_.home_of(key), .epoch = entry.epoch()});
      remove(entry);
      slab_.count(user_id, kEvictions, 1);
    }
    entry->lower(kUsed);
  }
  return evicted;
}

std::vector<Moved> KeyIndex::moved_away(std::uint32_t channel, std::uint64_t& cursor,
                                        std::uint64_t places) const {
  std::vector<Moved> moved;
  for (std::uint64_t turn = 0; turn < places; ++turn) {
    const auto entry_index = static_cast<std::int64_t>(cursor++ & (header_.num_entries - 1));
    const std::int64_t key = keys_[entry_index].load(std::memory_order_acquire);
    if (key <= kTombstone || header_.home_of(key) != header_.node || header_.channel_of(key) != channel)
      continue;
    const std::uint32_t epoch = slab_.ownership_epoch(entry_index, std::memory_order_acquire);
    const std::uint32_t owner = slab_.entry(entry_index).owner;
    if (owner != header_.node) moved.push_back({.key = key, .node = owner, .epoch = epoch});
  }
  return moved;
}

void KeyIndex::forget(LockedEntry& entry, std::uint32_t epoch) {
  const LockGuard guard(header_.index_lock, slab_.users(), entry.user_id());
  header_.first_epoch = std::max(header_.first_epoch, epoch);
  remove(entry);
}

// Open addressing. A removed key leaves a tombstone, which turns back into nothing where the next place is
// empty.
std::int64_t KeyIndex::probe(std::int64_t key) const {
  const std::uint64_t mask = header_.num_entries - 1;
  std::uint64_t place = mix(static_cast<std::uint64_t>(key)) & mask;
  for (std::uint64_t probes = 0; probes <= mask; ++probes, place = (place + 1) & mask) {
    const std::int64_t found = keys_[place].load(std::memory_order_acquire);
    if (found == key) return static_cast<std::int64_t>(place);
    if (found == kNoKey) return -1;
  }
  return -1;
}

// A worker waits a moment for its node's channels to evict what has moved here; channels do that themselves.
std::int64_t KeyIndex::make(std::uint32_t user_id, std::int64_t key) {
  const bool waits = user_id >= kMaxChannels && header_.num_nodes > 1;
  const auto deadline = std::chrono::steady_clock::now() + kRoomWait;
  for (;;) {
    if (const std::int64_t entry_index = try_make(user_id, key); entry_index >= 0) return entry_index;
    if (!waits || std::chrono::steady_clock::now() > deadline) throw_full();
    std::this_thread::sleep_for(kRoomPoll);
  }
}

// -1 if the index is full.
std::int64_t KeyIndex::try_make(std::uint32_t user_id, std::int64_t key) {
  const LockGuard guard(header_.index_lock, slab_.users(), user_id);
  const std::int64_t found = find(key);
  if (found >= 0) return found;
  const bool full = header_.live_entries >= header_.num_entries / 2;
  if (full && !evict_one(user_id)) return -1;
  const std::uint64_t mask = header_.num_entries - 1;
  const bool at_home = header_.home_of(key) == header_.node;
  do {  // an eviction may change which place the key is found at
    std::uint64_t place = mix(static_cast<std::uint64_t>(key)) & mask;
    while (keys_[place].load(std::memory_order_relaxed) > kTombstone) place = (place + 1) & mask;
    LockedEntry entry(slab_, static_cast<std::int64_t>(place), user_id);
    entry->state = State::kAbsent;
    entry->put(kUsed);
    entry->version = 0;
    entry.set_owner(header_.home_of(key), at_home ? header_.first_epoch : 0);
    if (at_home) {
      if (!rows_.try_take_slot(entry)) continue;
      rows_.initialize(entry, key);
      entry->state = State::kOwned;
    }
    ++header_.live_entries;
    keys_[place].store(key, std::memory_order_release);
    return entry.index();
  } while (evict_one(user_id));
  return -1;
}

// The clock algorithm: passes over the entries, sparing once those used since its last pass. What can go:
// rows of keys owned at their home, and remembered locations. Rows that have moved here go by evict_moved.
bool KeyIndex::evict_one(std::uint32_t user_id) {
  const std::uint64_t mask = header_.num_entries - 1;
  for (std::uint64_t turns = 0; turns < 2 * header_.num_entries; ++turns) {
    const std::uint64_t place = header_.eviction_cursor++ & mask;
    if (keys_[place].load(std::memory_order_relaxed) <= kTombstone) continue;
    // Who is busy is in use; and waiting here could wait for ourselves.
    LockedEntry entry(slab_, static_cast<std::int64_t>(place), user_id, std::try_to_lock);
    if (!entry.owns()) continue;
    const bool at_home = header_.home_of(keys_[place].load(std::memory_order_relaxed)) == header_.node;
    const bool owned_at_home = entry->state == State::kOwned && at_home;
    const bool only_a_location = entry->state == State::kAbsent && !at_home;
    const bool evictable = (owned_at_home || only_a_location) && !entry->has(kShared | kUsed | kPinned);
    entry->lower(kUsed);
    if (!evictable) continue;
    if (owned_at_home) {  // others may remember where it was; what is made anew here must be more recent
      header_.first_epoch = std::max(header_.first_epoch, entry.epoch());
      slab_.count(user_id, kEvictions, 1);
    }
    remove(entry);
    return true;
  }
  return false;
}

// A process that is killed here leaves a slot unused, but no wrong entry.
void KeyIndex::remove(LockedEntry& entry) {
  const auto place = static_cast<std::uint64_t>(entry.index());
  const std::uint64_t mask = header_.num_entries - 1;
  std::uint64_t at = place;
  const bool last = keys_[(place + 1) & mask].load(std::memory_order_relaxed) == kNoKey;
  keys_[at].store(last ? kNoKey : kTombstone, std::memory_order_release);
  --header_.live_entries;
  while (last && keys_[at = (at - 1) & mask].load(std::memory_order_relaxed) == kTombstone)
    keys_[at].store(kNoKey, std::memory_order_release);
  const bool has_row = entry->state != State::kAbsent;
  entry->state = State::kAbsent;
  if (has_row) rows_.free_slot(entry);
}

void KeyIndex::throw_full() const {
  throw Error(Code::kUnavailable,
              "parameters: node " + std::to_string(header_.node) + " holds " +
                  std::to_string(header_.num_entries / 2) +
                  " keys or fewer, as many as fit into its slab, and can evict none: all are "
                  "replicated, on loan from another node, or just used; give the table a larger capacity");
}

}  // namespace torchrelay::parameters
