#include "torchrelay/parameters/owner_side.h"

#include <algorithm>

#include "torchrelay/parameters/request_router.h"

namespace torchrelay::parameters {

OwnerSide::SharedKey* OwnerSide::shared_key(std::int64_t entry_index) {
  if (!state_.store->entry(entry_index).has(kShared)) return nullptr;
  return &shared_[state_.control(entry_index).list_place];
}

OwnerSide::Replica* OwnerSide::replica_of(std::int64_t entry_index, std::uint16_t node) {
  SharedKey* key = shared_key(entry_index);
  if (key == nullptr) return nullptr;
  const auto found = std::ranges::find(key->replicas, node, &Replica::node);
  return found == key->replicas.end() ? nullptr : &*found;
}

// The writer has marked the entry, and no round has visited it since.
void OwnerSide::raise_version(LockedEntry& entry) {
  if (!entry->has(kChanged)) return;
  entry->lower(kChanged);
  ++entry->version;
}

void OwnerSide::raise_version_anew(LockedEntry& entry) {
  ++entry->version;
  if (entry->has(kShared)) state_.mark_changed(entry.index());
}

void OwnerSide::handle_acquire(const Record& record) {
  Store& store = *state_.store;
  const bool at_home = store.header().home_of(record.key) == state_.node;
  const auto find = [&] {
    return at_home ? store.index().find_or_try_make(state_.channel_id, record.key)
                   : store.index().find(record.key);
  };
  const bool found = with_locked(store, record.key, state_.channel_id, find, [&](LockedEntry& entry) {
    entry->state == State::kOwned ? decide(entry, record) : router_.route(record);
  });
  if (!found) router_.route(record);
}

// The epoch shows whether the replica is one that we granted since we own the key.
void OwnerSide::handle_replica_write(const Record& record, const std::byte* payload) {
  const std::int64_t entry_index = state_.store->index().find(record.key);
  if (entry_index < 0) return;
  LockedEntry entry = state_.lock(entry_index);
  if (entry.key() != record.key || entry->state != State::kOwned || record.epoch != entry.epoch())
    return;  // the replica has become the owner
  record.kind == RecordKind::kUpdate ? apply_update(entry, record, payload)
                                     : apply_overwrite(entry, record, payload);
}

// Relocate if no other node needs the key; else replicate (CIKM 2023, section 4).
void OwnerSide::decide(LockedEntry& entry, const Record& record) {
  EntryControl& mine = state_.control(entry);
  if (record.node == state_.node) {  // we became the owner while our acquire was in flight
    mine.wanted = false;
    return;
  }
  const bool nobody_else = shared_key(entry.index()) == nullptr && mine.intents == 0;
  const bool relocate = state_.options.techniques == Techniques::kRelocationOnly ||
                        (state_.options.techniques == Techniques::kAll && nobody_else);
  relocate ? transfer(entry, record.node) : grant(entry, record.node);
}

void OwnerSide::transfer(LockedEntry& entry, std::uint16_t node) {
  const std::int64_t key = entry.key();
  const std::uint32_t epoch = entry.epoch() + 1;
  state_.outbox.put(node,
                    {.kind = RecordKind::kTransfer,
                     .node = state_.node,
                     .epoch = epoch,
                     .key = key,
                     .version = entry->version},
                    entry.row(), entry.row_bytes());
  if (shared_key(entry.index()) != nullptr) remove_replica(entry, node);
  state_.store->rows().free_slot(entry);
  entry->state = State::kAbsent;
  entry->put(kUsed);  // messages in flight to us must still find the owner
  state_.update_pin(entry);
  entry.set_owner(node, epoch);
  const std::uint32_t home = state_.store->header().home_of(key);
  if (home == state_.node || home == node) return;
  state_.outbox.put(home, {.kind = RecordKind::kLocation, .node = node, .epoch = epoch, .key = key});
}

void OwnerSide::grant(LockedEntry& entry, std::uint16_t node) {
  raise_version(entry);
  if (shared_key(entry.index()) == nullptr) {
    entry->raise(kShared);
    state_.control(entry).list_place = static_cast<std::uint32_t>(shared_.size());
    shared_.push_back({.entry_index = entry.index(), .replicas = {}});
  }
  if (replica_of(entry.index(), node) == nullptr)
    shared_key(entry.index())->replicas.push_back({.node = node, .version = entry->version});
  state_.outbox.put(node,
                    {.kind = RecordKind::kGrant,
                     .node = state_.node,
                     .epoch = entry.epoch(),
                     .key = entry.key(),
                     .version = entry->version},
                    entry.row(), entry.row_bytes());
}

void OwnerSide::refresh(LockedEntry& entry, Replica& replica, std::uint8_t flags) {
  replica.version = entry->version;
  state_.outbox.put(replica.node,
                    {.kind = RecordKind::kRefresh,
                     .flags = flags,
                     .node = state_.node,
                     .key = entry.key(),
                     .version = entry->version},
                    entry.row(), entry.row_bytes());
  state_.count(kRefreshes);
  refresh_age_ += ChannelState::Clock::now() - last_refreshes_;
}

void OwnerSide::refresh_replicas(LockedEntry& entry) {
  SharedKey* key = shared_key(entry.index());
  if (key == nullptr) return;
  raise_version(entry);
  for (Replica& replica : key->replicas)
    if (replica.version != entry->version) refresh(entry, replica, kNoFlags);
}

void OwnerSide::refresh_all() {
  for (const SharedKey& key : shared_) {
    LockedEntry entry = state_.lock(key.entry_index);
    refresh_replicas(entry);
  }
  end_refreshes();
}

bool OwnerSide::catch_up(std::uint16_t node, const std::int64_t* keys,
                         const std::vector<std::uint32_t>& indices) {
  bool any = false;
  for (const std::uint32_t i : indices) {
    const std::int64_t entry_index = state_.store->index().find(keys[i]);
    if (entry_index < 0) continue;
    Replica* replica = replica_of(entry_index, node);
    if (replica == nullptr) continue;
    any = true;
    LockedEntry entry = state_.lock(entry_index);
    raise_version(entry);
    if (replica->version != entry->version) refresh(entry, *replica, kNoFlags);
  }
  return any;
}

void OwnerSide::remove_replica(LockedEntry& entry, std::uint16_t node) {
  SharedKey* key = shared_key(entry.index());
  if (key == nullptr) return;
  std::erase_if(key->replicas, [node](const Replica& replica) { return replica.node == node; });
  if (!key->replicas.empty()) return;
  entry->lower(kShared | kChanged);
  const std::uint32_t place = state_.control(entry).list_place;
  if (place + 1 != shared_.size()) {
    shared_[place] = std::move(shared_.back());
    state_.control(shared_[place].entry_index).list_place = place;
  }
  shared_.pop_back();
}

void OwnerSide::consider_upgrade(LockedEntry& entry) {
  const SharedKey* key = shared_key(entry.index());
  if (state_.options.techniques != Techniques::kAll || key == nullptr || key->replicas.size() != 1) return;
  const EntryControl& mine = state_.control(entry);
  if (mine.intents != 0) return;
  if (state_.rounds - mine.arrived < state_.options.hysteresis_rounds)
    reconsider_.push_back(entry.index());
  else
    transfer(entry, key->replicas.front().node);
}

void OwnerSide::reconsider_upgrades() {
  std::vector<std::int64_t> again;
  again.swap(reconsider_);
  for (const std::int64_t entry_index : again) {
    LockedEntry entry = state_.lock(entry_index);
    if (entry->state == State::kOwned) consider_upgrade(entry);
  }
}

void OwnerSide::apply_update(LockedEntry& entry, const Record& record, const std::byte* payload) {
  raise_version(entry);
  const std::uint32_t before = entry->version;
  if (record.payload_bytes != 0) {
    entry.apply(payload);
    raise_version_anew(entry);
  }
  Replica* replica = replica_of(entry.index(), record.node);
  const bool dropped = (record.flags & kDrop) != 0;
  if (!dropped && replica != nullptr && record.version != before) return refresh(entry, *replica, kAcks);
  if (replica != nullptr) replica->version = entry->version;
  acknowledge(entry, record.node, dropped ? kDrop : kNoFlags);
  if (!dropped || replica == nullptr) return;
  remove_replica(entry, record.node);
  consider_upgrade(entry);
}

void OwnerSide::apply_overwrite(LockedEntry& entry, const Record& record, const std::byte* payload) {
  raise_version(entry);
  std::memcpy(entry.row(), payload, record.payload_bytes);
  raise_version_anew(entry);
  if (Replica* replica = replica_of(entry.index(), record.node)) replica->version = entry->version;
  acknowledge(entry, record.node, kNoFlags);
}

void OwnerSide::acknowledge(const LockedEntry& entry, std::uint16_t node, std::uint8_t flags) {
  state_.outbox.put(node, {.kind = RecordKind::kAck,
                           .flags = flags,
                           .node = state_.node,
                           .key = entry.key(),
                           .version = entry->version});
}

}  // namespace torchrelay::parameters
