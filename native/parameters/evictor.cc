#include "parameters/evictor.h"

#include "core/error.h"
#include "parameters/request_router.h"

namespace torchrelay::parameters {
namespace {

constexpr std::uint64_t kRoundsPerPass =
    16;  // in which all entries are looked at, where there is little room

}  // namespace

// The key is this node's again. If it gave a replica up to an owner before the one that evicted the key, that
// owner's acknowledgement may still be on its way: the key begins anew after it.
void Evictor::handle_eviction(const Record& record) {
  const std::int64_t entry_index = state_.store->index().find(record.key);
  if (entry_index < 0) return;
  {
    LockedEntry entry = state_.lock(entry_index);
    if (entry->state == State::kOwned || record.epoch <= entry.epoch()) return;
    entry.set_owner(state_.node, record.epoch);
    if (entry->state == State::kReplica) return;
    begin_anew(entry);
  }
  router_.unpark(record.key);
}

void Evictor::begin_anew(LockedEntry& entry) {
  const std::int64_t key = entry.key();
  if (!entry->has(kPinned) && !router_.is_parked(key))
    return state_.store->index().forget(entry, entry.epoch());
  take_slot(entry);
  state_.store->rows().initialize(entry, key);
  entry->version = 0;
  entry->state = State::kOwned;
}

void Evictor::make_room() {
  Store& store = *state_.store;
  const bool keys_tight = store.index().tight(state_.channel_id);
  making_room_ = keys_tight || store.rows().tight(state_.channel_id);
  std::vector<std::int64_t> waiting;
  waiting.swap(without_room_);
  for (const std::int64_t key : waiting)
    if (store.index().find_or_try_make(state_.channel_id, key) >= 0)
      router_.unpark(key);
    else
      without_room_.push_back(key);
  if (!making_room_) return;
  const std::uint64_t places = store.header().num_entries / kRoundsPerPass;
  evict_moved(places);
  if (!keys_tight) return;
  for (const Moved& moved : store.index().moved_away(state_.channel_id, recall_cursor_, places))
    state_.outbox.put(
        moved.node,
        {.kind = RecordKind::kRecall, .node = state_.node, .epoch = moved.epoch, .key = moved.key});
}

void Evictor::evict_moved(std::uint64_t places) {
  for (const Moved& evicted :
       state_.store->index().evict_moved(state_.channel_id, state_.channel_id, eviction_cursor_, places))
    report_eviction(evicted.key, evicted.epoch);
}

void Evictor::report_eviction(std::int64_t key, std::uint32_t epoch) {
  const auto home = static_cast<std::uint16_t>(state_.store->header().home_of(key));
  state_.outbox.put(
      home, {.kind = RecordKind::kLocation, .flags = kEvicted, .node = home, .epoch = epoch + 1, .key = key});
}

// Used since the last recall, it stays for once.
void Evictor::handle_recall(const Record& record) {
  const std::int64_t entry_index = state_.store->index().find(record.key);
  if (entry_index < 0 || state_.store->header().home_of(record.key) == state_.node) return;
  LockedEntry entry = state_.lock(entry_index);
  if (entry.key() != record.key || entry->state != State::kOwned) return;
  const bool stays = entry->has(kShared | kUsed | kPinned);
  entry->lower(kUsed);
  if (stays) return;
  report_eviction(record.key, entry.epoch());
  state_.store->index().forget(entry, 0);
  state_.count(kEvictions);
}

void Evictor::take_slot(LockedEntry& entry) {
  try {
    return state_.store->index().take_slot(entry);
  } catch (const Error&) {
    if (!state_.store->header().dynamic()) throw;
  }
  for (int pass = 0; pass < 2; ++pass)
    evict_moved(state_.store->header().num_entries);  // the first spares the used
  state_.store->index().take_slot(entry);
}

}  // namespace torchrelay::parameters
