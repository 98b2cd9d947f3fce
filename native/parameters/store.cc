#include "parameters/store.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace torchrelay::parameters {
namespace {

// A key is looked up, and its entry fetched, this many keys before it is served; its row a little later.
constexpr std::size_t kEntryAhead = 24, kRowAhead = 12;
constexpr std::size_t kRing = 32;  // more than kEntryAhead
constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kPrefetchBytes = 1024;  // of a row; the hardware follows from there

template <bool kWrite>
void prefetch_row(const std::byte* row, std::size_t size) {
  for (std::size_t at = 0; at < std::min(size, kPrefetchBytes); at += kCacheLine)
    __builtin_prefetch(row + at, kWrite ? 1 : 0);
}

}  // namespace

Store::Store(Slab slab, const KeyInit& init)
    : Slab(std::move(slab)), rows_(*this, init), index_(*this, rows_), membership_(*this) {}

std::shared_ptr<Store> Store::create(const StoreSpec& spec) {
  std::shared_ptr<Store> store(new Store(Slab::create(spec), spec.init));
  store->rows_.initialize_dense();
  store->publish();
  return store;
}

std::shared_ptr<Store> Store::attach(const std::string& address, const KeyInit& init) {
  return std::shared_ptr<Store>(new Store(Slab::attach(address), init));
}

std::size_t Store::value_bytes(Op op, std::int64_t key) const {
  const ClassInfo& info = class_of(has_one_class() ? 0 : key);
  return (whole_row(op) ? info.row_length : info.length) * size_bytes(header().dtype);
}

std::size_t Store::value_bytes(Op op, const std::int64_t* keys, std::size_t count) const {
  bool all_valid = true;
  for (std::size_t i = 0; i < count; ++i) all_valid &= header().valid(keys[i]);
  if (!all_valid) throw_out_of_range(keys, count);
  if (has_one_class()) return count * value_bytes(op, 0);
  std::size_t total = 0;
  for (std::size_t i = 0; i < count; ++i) total += value_bytes(op, keys[i]);
  return total;
}

void Store::throw_out_of_range(const std::int64_t* keys, std::size_t count) const {
  const auto* bad =
      std::find_if(keys, keys + count, [this](std::int64_t key) { return !header().valid(key); });
  const std::string range = header().dynamic()
                                ? "the two smallest int64 values are reserved"
                                : "this table has the keys 0 to " + std::to_string(header().num_keys - 1);
  throw Error(Code::kArgument, "parameters: keys[" + std::to_string(bad - keys) +
                                   "] = " + std::to_string(*bad) + " is out of range: " + range +
                                   "; nothing was read or written");
}

// Before the row changes: who is killed meanwhile leaves no change that no round looks at. Inline, so that
// the entry stays in registers.
[[gnu::always_inline]] inline void Store::raise_and_mark(LockedEntry& entry, Flag flag) {
  if (entry->has(flag)) return;
  changed(header().channel_of(entry.key())).mark(header().index_in_channel(entry.index()));
  entry->raise(flag);
}

void Store::access(Op op, std::uint32_t user_id, const std::int64_t* keys, std::size_t count, Values values,
                   std::vector<Missed>& missed) {
  const std::size_t before = missed.size();
  access_batch({op, user_id, keys, count, values, missed, nullptr});
  const Stat stat = reads(op) ? kLocalPulls : op == Op::kPush ? kLocalPushes : kLocalSets;
  this->count(user_id, stat, count - (missed.size() - before));
}

void Store::access_owned(Op op, std::uint32_t user_id, const std::int64_t* keys, std::size_t count,
                         Values values, std::vector<Missed>& missed, std::vector<std::uint32_t>& shared) {
  access_batch({op, user_id, keys, count, values, missed, &shared});
}

// A key that is not here and was not here a moment ago: reported without taking its lock. Owner and epoch
// may be of different moments, but the owner is never the older of the two, so that no node is asked to wait
// for a key that is not on its way there.
bool Store::known_absent(std::int64_t entry_index, std::size_t index, std::vector<Missed>& missed) const {
  const Entry& place = entry(entry_index);
  if (header().dynamic() || place.slot.load(std::memory_order_relaxed) != kNoSlot) return false;
  const std::uint32_t epoch = ownership_epoch(entry_index, std::memory_order_acquire);
  missed.push_back({static_cast<std::uint32_t>(index), place.owner.load(std::memory_order_relaxed), epoch});
  return true;
}

// A channel must not wait for a free slot: others may wait for it.
std::int64_t Store::find_to_access(const Batch& batch, std::int64_t key) {
  if (header().home_of(key) != header().node) return index_.find(key);
  return batch.shared != nullptr ? index_.find_or_try_make(batch.user_id, key)
                                 : index_.find_or_make(batch.user_id, key);
}

bool Store::access_entry(const Batch& batch, std::size_t i, std::int64_t entry_index, std::size_t offset) {
  const Op op = batch.op;
  LockedEntry entry(*this, entry_index, batch.user_id);
  if (header().dynamic() && keys()[entry_index].load(std::memory_order_relaxed) != batch.keys[i])
    return false;
  const auto position = static_cast<std::uint32_t>(i);
  const bool owned = entry->state == State::kOwned;
  const bool lent = entry->has(kLent);
  const bool elsewhere = entry->state == State::kAbsent || (op == Op::kPush && entry->has(kLeaving));
  const bool lacks = lent && (op == Op::kPullRow || (op == Op::kPull && entry->has(kDirty | kLeaving)));
  if (!owned && (elsewhere || lacks || sets(op) || batch.shared != nullptr)) {
    // What a replica does not serve goes to the owner behind the pushes that its own channel has sent there.
    const std::uint32_t owner = elsewhere ? entry->owner.load() : header().node;
    batch.missed.push_back({.index = position, .owner = owner, .epoch = entry.epoch()});
    return true;
  }
  if (entry->has(kShared)) {
    if (!reads(op)) raise_and_mark(entry, kChanged);
    if (batch.shared != nullptr) batch.shared->push_back(position);
  }
  if (!owned && op == Op::kPush) raise_and_mark(entry, kDirty);
  const ClassInfo& info = entry.row_class();
  const std::size_t value_bytes = info.length * size_bytes(header().dtype);
  const std::size_t row_bytes = info.row_length * size_bytes(header().dtype);
  std::byte* row = entry.row();
  switch (op) {
    case Op::kPull: std::memcpy(batch.values.to + offset, row, value_bytes); break;
    case Op::kPullRow: std::memcpy(batch.values.to + offset, row, row_bytes); break;
    case Op::kSet: std::memcpy(row, batch.values.from + offset, value_bytes); break;
    case Op::kSetRow: std::memcpy(row, batch.values.from + offset, row_bytes); break;
    case Op::kPush:
      if (!lent) entry.apply(batch.values.from + offset);
      if (!owned) add(header().dtype, entry.accumulator(), batch.values.from + offset, info.length);
  }
  if (header().dynamic()) entry->raise(kUsed);
  return true;
}

void Store::access_unfound(const Batch& batch, std::size_t i, std::size_t offset) {
  const std::int64_t key = batch.keys[i];
  for (;;) {
    const std::int64_t entry_index = find_to_access(batch, key);
    if (entry_index < 0)
      return batch.missed.push_back(
          {.index = static_cast<std::uint32_t>(i), .owner = header().home_of(key), .epoch = 0});
    if (access_entry(batch, i, entry_index, offset)) return;
  }
}

void Store::access_batch(const Batch& batch) {
  const Op op = batch.op;
  const std::int64_t* keys = batch.keys;
  std::int64_t indices[kRing];
  const auto look_up = [&](std::size_t i) {
    const std::int64_t entry_index = index_.find(keys[i]);
    indices[i % kRing] = entry_index;
    if (entry_index >= 0) __builtin_prefetch(&entry(entry_index), 1);
  };
  const auto fetch_row = [&](std::size_t i) {
    const std::int64_t entry_index = indices[i % kRing];
    if (entry_index < 0) return;
    const std::uint32_t slot = entry(entry_index).slot.load(std::memory_order_relaxed);
    if (slot == kNoSlot) return prefetch_location(entry_index);
    const ClassInfo& info = class_of(entry_index);
    const std::byte* row = at(info.rows_offset + info.stride_bytes * slot);
    reads(op) ? prefetch_row<false>(row, info.stride_bytes) : prefetch_row<true>(row, info.stride_bytes);
  };
  const std::size_t count = batch.count;
  const std::size_t uniform_bytes = has_one_class() ? value_bytes(op, 0) : 0;
  for (std::size_t i = 0; i < std::min(count, kEntryAhead); ++i) look_up(i);
  for (std::size_t i = 0; i < std::min(count, kRowAhead); ++i) fetch_row(i);
  std::size_t offset = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kEntryAhead < count) look_up(i + kEntryAhead);
    if (i + kRowAhead < count) fetch_row(i + kRowAhead);
    const std::int64_t entry_index = indices[i % kRing];
    const bool is_served = entry_index >= 0 && (known_absent(entry_index, i, batch.missed) ||
                                                access_entry(batch, i, entry_index, offset));
    if (!is_served) access_unfound(batch, i, offset);
    offset += uniform_bytes != 0 ? uniform_bytes : value_bytes(op, keys[i]);
  }
}

}  // namespace torchrelay::parameters
