// Tables without a number of keys: an open-addressing index of int64 keys, made at first use, evicted when
// full.
//
// Looking up takes no lock. Making and removing keys takes the index lock. An entry never moves, so its lock
// can be taken safely; its taker checks that the entry still is the key's. A removed key leaves a
// tombstone, which turns back into nothing where the next place is empty.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
#include <unordered_set>

#include "torchrelay/error.h"
#include "torchrelay/parameters/locked_entry.h"

namespace torchrelay::parameters {
namespace {

constexpr std::int64_t kNoKey = INT64_MIN;
constexpr std::int64_t kTombstone = INT64_MIN + 1;
constexpr auto kRoomWait = std::chrono::seconds(1);
constexpr auto kRoomPoll = std::chrono::milliseconds(1);

// SplitMix64 (Steele, Lea, Flood 2014): every bit of the result depends on every bit of the argument.
std::uint64_t mix(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

bool mostly(std::uint64_t used, std::uint64_t most) { return used >= most - most / 8; }

double unit(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }  // [0, 1)

}  // namespace

std::int64_t Store::find(std::int64_t key) const {
  if (!dynamic()) return key;
  const std::uint64_t mask = header_->num_entries - 1;
  std::uint64_t place = mix(static_cast<std::uint64_t>(key)) & mask;
  for (std::uint64_t probes = 0; probes <= mask; ++probes, place = (place + 1) & mask) {
    const std::int64_t found = keys_[place].load(std::memory_order_acquire);
    if (found == key) return static_cast<std::int64_t>(place);
    if (found == kNoKey) return -1;
  }
  return -1;
}

std::int64_t Store::find_or_make(std::uint32_t user_id, std::int64_t key) {
  const std::int64_t entry_index = find(key);
  return entry_index >= 0 ? entry_index : make(user_id, key);
}

std::int64_t Store::find_or_try_make(std::uint32_t user_id, std::int64_t key) {
  const std::int64_t entry_index = find(key);
  return entry_index >= 0 ? entry_index : try_make(user_id, key);
}

// A worker waits a moment for its node's channels to evict what has moved here; channels do that themselves.
std::int64_t Store::make(std::uint32_t user_id, std::int64_t key) {
  const bool waits = user_id >= kMaxChannels && header_->num_nodes > 1;
  const auto deadline = std::chrono::steady_clock::now() + kRoomWait;
  for (;;) {
    if (const std::int64_t entry_index = try_make(user_id, key); entry_index >= 0) return entry_index;
    if (!waits || std::chrono::steady_clock::now() > deadline) throw_full();
    std::this_thread::sleep_for(kRoomPoll);
  }
}

// -1 if the index is full.
std::int64_t Store::try_make(std::uint32_t user_id, std::int64_t key) {
  const LockGuard guard(header_->index_lock, users_, user_id);
  const std::int64_t found = find(key);
  if (found >= 0) return found;
  const bool full = header_->live_entries >= header_->num_entries / 2;
  if (full && !evict_one(user_id)) return -1;
  const std::uint64_t mask = header_->num_entries - 1;
  const bool at_home = home_of(key) == header_->node;
  do {  // an eviction may change which place the key is found at
    std::uint64_t place = mix(static_cast<std::uint64_t>(key)) & mask;
    while (keys_[place].load(std::memory_order_relaxed) > kTombstone) place = (place + 1) & mask;
    LockedEntry entry(*this, static_cast<std::int64_t>(place), user_id);
    entry->state = State::kAbsent;
    entry->put(kUsed);
    entry->version = 0;
    entry.set_owner(home_of(key), at_home ? header_->first_epoch : 0);
    if (at_home) {
      if (!take_free_slot(entry)) continue;
      initialize_row(entry, key);
      entry->state = State::kOwned;
    }
    ++header_->live_entries;
    keys_[place].store(key, std::memory_order_release);
    return entry.index();
  } while (evict_one(user_id));
  return -1;
}

// The clock algorithm: passes over the entries, sparing once those used since its last pass. What can go:
// rows of keys owned at their home, and remembered locations. Rows that have moved here go by evict_moved.
bool Store::evict_one(std::uint32_t user_id) {
  const std::uint64_t mask = header_->num_entries - 1;
  for (std::uint64_t turns = 0; turns < 2 * header_->num_entries; ++turns) {
    const std::uint64_t place = header_->eviction_cursor++ & mask;
    if (keys_[place].load(std::memory_order_relaxed) <= kTombstone) continue;
    // Who is busy is in use; and waiting here could wait for ourselves.
    LockedEntry entry(*this, static_cast<std::int64_t>(place), user_id, std::try_to_lock);
    if (!entry.owns()) continue;
    const bool at_home = home_of(keys_[place].load(std::memory_order_relaxed)) == header_->node;
    const bool owned_at_home = entry->state == State::kOwned && at_home;
    const bool only_a_location = entry->state == State::kAbsent && !at_home;
    const bool evictable = (owned_at_home || only_a_location) && !entry->has(kShared | kUsed | kPinned);
    entry->lower(kUsed);
    if (!evictable) continue;
    if (owned_at_home) {  // others may remember where it was; what is made anew here must be more recent
      header_->first_epoch = std::max(header_->first_epoch, entry.epoch());
      count(user_id, kEvictions, 1);
    }
    remove(entry);
    return true;
  }
  return false;
}

bool Store::rows_tight(std::uint32_t user_id) {
  const LockGuard guard(pools_[0].lock, users_, user_id);
  return mostly(pools_[0].never_used - pools_[0].free_count, classes_[0].capacity);
}

bool Store::keys_tight(std::uint32_t user_id) {
  const LockGuard guard(header_->index_lock, users_, user_id);
  return mostly(header_->live_entries, header_->num_entries / 2);
}

std::vector<Moved> Store::moved_away(std::uint32_t channel, std::uint64_t& cursor,
                                     std::uint64_t places) const {
  std::vector<Moved> moved;
  for (std::uint64_t turn = 0; turn < places; ++turn) {
    const std::uint64_t place = cursor++ & (header_->num_entries - 1);
    const std::int64_t key = keys_[place].load(std::memory_order_acquire);
    if (key <= kTombstone || home_of(key) != header_->node || channel_of(key) != channel) continue;
    const std::uint32_t epoch = epochs_[place].load(std::memory_order_acquire);
    const std::uint32_t owner = entries_[place].owner;
    if (owner != header_->node) moved.push_back({.key = key, .node = owner, .epoch = epoch});
  }
  return moved;
}

std::vector<Moved> Store::evict_moved(std::uint32_t user_id, std::uint32_t channel, std::uint64_t& cursor,
                                      std::uint64_t places) {
  std::vector<Moved> evicted;
  const LockGuard guard(header_->index_lock, users_, user_id);
  for (std::uint64_t turn = 0; turn < places; ++turn) {
    const std::uint64_t place = cursor++ & (header_->num_entries - 1);
    const std::int64_t key = keys_[place].load(std::memory_order_relaxed);
    if (key <= kTombstone || home_of(key) == header_->node || channel_of(key) != channel) continue;
    LockedEntry entry(*this, static_cast<std::int64_t>(place), user_id, std::try_to_lock);
    if (!entry.owns()) continue;
    if (entry->state == State::kOwned && !entry->has(kShared | kUsed | kPinned)) {
      evicted.push_back({.key = key, .node = home_of(key), .epoch = entry.epoch()});
      remove(entry);
      count(user_id, kEvictions, 1);
    }
    entry->lower(kUsed);
  }
  return evicted;
}

void Store::forget(LockedEntry& entry, std::uint32_t epoch) {
  const LockGuard guard(header_->index_lock, users_, entry.user_id());
  header_->first_epoch = std::max(header_->first_epoch, epoch);
  remove(entry);
}

// A process that is killed here leaves a slot unused, but no wrong entry.
void Store::remove(LockedEntry& entry) {
  const auto place = static_cast<std::uint64_t>(entry.index());
  const std::uint64_t mask = header_->num_entries - 1;
  std::uint64_t at = place;
  const bool last = keys_[(place + 1) & mask].load(std::memory_order_relaxed) == kNoKey;
  keys_[at].store(last ? kNoKey : kTombstone, std::memory_order_release);
  --header_->live_entries;
  while (last && keys_[at = (at - 1) & mask].load(std::memory_order_relaxed) == kTombstone)
    keys_[at].store(kNoKey, std::memory_order_release);
  const bool has_row = entry->state != State::kAbsent;
  entry->state = State::kAbsent;
  if (has_row) free_slot(entry);
}

std::size_t Store::nearest_local(std::int64_t* keys, std::size_t count, std::int64_t low, std::int64_t high,
                                 const std::vector<std::int64_t>& taken, bool distinct,
                                 const std::uint8_t* drawable) const {
  std::unordered_set<std::int64_t> used(taken.begin(), taken.end());
  const auto usable = [&](std::int64_t key) {
    if (key < low || key >= high || (drawable != nullptr && drawable[key - low] == 0)) return false;
    const std::int64_t entry_index = find(key);
    return entry_index >= 0 && entries_[entry_index].slot.load(std::memory_order_relaxed) != kNoSlot &&
           !used.contains(key);
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

void Store::initialize_row(LockedEntry& entry, std::int64_t key) {
  const ClassInfo& info = entry.row_class();
  const Dtype dtype = header_->dtype;
  std::byte* row = entry.row();
  std::memset(row, 0, info.stride_bytes);
  const std::uint64_t stream = mix(mix(static_cast<std::uint64_t>(key)) + init_.seed);
  for (std::uint32_t i = 0; i < info.length && init_.kind != InitKind::kZeros; ++i) {
    double value = init_.a;
    const double u = unit(mix(stream + 2 * i)), v = unit(mix(stream + 2 * i + 1));
    if (init_.kind == InitKind::kUniform) value += (init_.b - init_.a) * u;
    if (init_.kind == InitKind::kNormal)  // Box and Muller
      value += init_.b * std::sqrt(-2 * std::log(1 - u)) * std::cos(6.283185307179586 * v);
    store_double(dtype, row + i * size_bytes(dtype), value);
  }
  header_->rule.initialize_state(dtype, row + info.length * size_bytes(dtype), info.length);
}

}  // namespace torchrelay::parameters
