// The owner's side of a channel: who gets a key, who gets a copy, and keeping the copies fresh.
#include <algorithm>

#include "torchrelay/parameters/channel.h"

namespace torchrelay::parameters {

Channel::SharedKey* Channel::shared(std::int64_t entry_index) {
  return !store_->entry(entry_index).has(kShared) ? nullptr : &shared_[control(entry_index).list_place];
}

Channel::Replica* Channel::replica_of(std::int64_t entry_index, std::uint32_t node) {
  SharedKey* key = shared(entry_index);
  if (key == nullptr) return nullptr;
  const auto found = std::ranges::find(key->replicas, node, &Replica::node);
  return found == key->replicas.end() ? nullptr : &*found;
}

// Under the entry's lock. Whoever changed the row has marked the entry, and no round has come to it since.
void Channel::raise_version(std::int64_t entry_index) {
  Entry& entry = store_->entry(entry_index);
  if (!entry.has(kChanged)) return;
  entry.lower(kChanged);
  ++entry.version;
}

// Under the entry's lock: this channel has changed the row.
void Channel::raise_version_anew(std::int64_t entry_index) {
  Entry& entry = store_->entry(entry_index);
  ++entry.version;
  if (entry.has(kShared)) mark_changed(entry_index);
}

// At the owner, or on to it.
void Channel::take_acquire(const Record& record) {
  const bool make = store_->home_of(record.key) == node_;
  std::int64_t entry_index = -1;
  do {
    entry_index = make ? store_->find_or_try_make(channel_id_, record.key) : store_->find(record.key);
    if (entry_index < 0) return route(record);
  } while (!take_acquire_at(entry_index, record));
}

// False if the entry has become another key's meanwhile.
bool Channel::take_acquire_at(std::int64_t entry_index, const Record& record) {
  Entry& entry = store_->entry(entry_index);
  const LockGuard guard = store_->guard(entry, channel_id_);
  if (store_->key_of(entry_index) != record.key) return false;
  entry.state == State::kOwned ? owner_acquire(entry_index, record) : route(record);
  return true;
}

// By the epoch we tell whether the replica is one that we granted since we own the key.
void Channel::take_from_replica(const Record& record, const std::byte* payload) {
  const std::int64_t entry_index = store_->find(record.key);
  if (entry_index < 0) return;
  Entry& entry = store_->entry(entry_index);
  const LockGuard guard = store_->guard(entry, channel_id_);
  if (store_->key_of(entry_index) != record.key || entry.state != State::kOwned ||
      record.epoch != store_->ownership_epoch(entry_index).load(std::memory_order_relaxed))
    return;  // the replica has become the owner
  record.kind == RecordKind::kUpdate ? owner_update(entry_index, record, payload)
                                     : owner_overwrite(entry_index, record, payload);
}

// Under the entry's lock. Relocate where nobody else needs the key; else replicate (CIKM 2023, section 4).
void Channel::owner_acquire(std::int64_t entry_index, const Record& record) {
  Control& mine = control(entry_index);
  if (record.node == node_) {  // we became the owner while our wish was under way
    mine.wanted = false;
    return;
  }
  const bool nobody_else = shared(entry_index) == nullptr && mine.intents == 0;
  const bool relocate = options_.techniques == Techniques::kRelocationOnly ||
                        (options_.techniques == Techniques::kAll && nobody_else);
  relocate ? transfer(entry_index, record.node) : grant(entry_index, record.node);
}

// Under the entry's lock.
void Channel::transfer(std::int64_t entry_index, std::uint32_t node) {
  Entry& entry = store_->entry(entry_index);
  const std::int64_t key = store_->key_of(entry_index);
  const ClassInfo& info = store_->class_of(entry_index);
  const std::uint32_t epoch = store_->ownership_epoch(entry_index).load(std::memory_order_relaxed) + 1;
  Record record{RecordKind::kTransfer, 0, static_cast<std::uint16_t>(node_), epoch, key, entry.version, 0};
  put(node, record, store_->row(entry_index), info.row_length * size_of(store_->header().element));
  if (shared(entry_index) != nullptr) remove_replica(entry_index, node);
  store_->free_slot(channel_id_, entry_index);
  entry.state = State::kAbsent;
  entry.put(kUsed);  // what is under way to us must still find where to go
  pin(entry_index);
  entry.owner = static_cast<std::uint16_t>(node);
  store_->ownership_epoch(entry_index).store(epoch, std::memory_order_release);
  const std::uint32_t home = store_->home_of(key);
  if (home == node_ || home == node) return;
  put(home, {RecordKind::kLocation, 0, static_cast<std::uint16_t>(node), epoch, key, 0, 0}, nullptr, 0);
}

// Under the entry's lock.
void Channel::grant(std::int64_t entry_index, std::uint32_t node) {
  Entry& entry = store_->entry(entry_index);
  raise_version(entry_index);
  if (shared(entry_index) == nullptr) {
    entry.raise(kShared);
    control(entry_index).list_place = static_cast<std::uint32_t>(shared_.size());
    shared_.push_back({entry_index, {}});
  }
  if (replica_of(entry_index, node) == nullptr)
    shared(entry_index)->replicas.push_back({node, entry.version});
  const ClassInfo& info = store_->class_of(entry_index);
  put(node,
      {RecordKind::kGrant, 0, static_cast<std::uint16_t>(node_),
       store_->ownership_epoch(entry_index).load(std::memory_order_relaxed), store_->key_of(entry_index),
       entry.version, 0},
      store_->row(entry_index), info.row_length * size_of(store_->header().element));
}

// Under the entry's lock.
void Channel::refresh(std::int64_t entry_index, Replica& replica, std::uint8_t flags) {
  const Entry& entry = store_->entry(entry_index);
  const ClassInfo& info = store_->class_of(entry_index);
  replica.version = entry.version;
  put(replica.node,
      {RecordKind::kRefresh, flags, static_cast<std::uint16_t>(node_), 0, store_->key_of(entry_index),
       entry.version, 0},
      store_->row(entry_index), info.row_length * size_of(store_->header().element));
  store_->count(channel_id_, kRefreshes, 1);
  refresh_age_ += Clock::now() - last_refresh_all_;
}

// Under the entry's lock.
void Channel::refresh_replicas(std::int64_t entry_index) {
  const Entry& entry = store_->entry(entry_index);
  SharedKey* key = shared(entry_index);
  if (key == nullptr) return;
  raise_version(entry_index);
  for (Replica& replica : key->replicas)
    if (replica.version != entry.version) refresh(entry_index, replica, 0);
}

void Channel::refresh_all() {
  for (const SharedKey& key : shared_) {
    const LockGuard guard = store_->guard(store_->entry(key.entry_index), channel_id_);
    refresh_replicas(key.entry_index);
  }
  last_refresh_all_ = Clock::now();
}

// Under the entry's lock.
void Channel::remove_replica(std::int64_t entry_index, std::uint32_t node) {
  SharedKey* key = shared(entry_index);
  if (key == nullptr) return;
  std::erase_if(key->replicas, [node](const Replica& replica) { return replica.node == node; });
  if (!key->replicas.empty()) return;
  Entry& entry = store_->entry(entry_index);
  entry.lower(kShared | kChanged);
  const std::uint32_t place = control(entry_index).list_place;
  if (place + 1 != shared_.size()) {
    shared_[place] = std::move(shared_.back());
    control(shared_[place].entry_index).list_place = place;
  }
  shared_.pop_back();
}

// Under the entry's lock: the only node that still needs the key becomes its owner.
void Channel::consider_upgrade(std::int64_t entry_index) {
  const SharedKey* key = shared(entry_index);
  if (options_.techniques != Techniques::kAll || key == nullptr || key->replicas.size() != 1) return;
  const Control& mine = control(entry_index);
  if (mine.intents != 0) return;
  if (rounds_ - mine.arrived < options_.hysteresis_rounds)
    reconsider_.push_back(entry_index);
  else
    transfer(entry_index, key->replicas.front().node);
}

// Under the entry's lock.
void Channel::owner_update(std::int64_t entry_index, const Record& record, const std::byte* payload) {
  Entry& entry = store_->entry(entry_index);
  const ClassInfo& info = store_->class_of(entry_index);
  raise_version(entry_index);
  const std::uint32_t before = entry.version;
  if (record.payload_bytes != 0) {
    store_->apply(store_->row(entry_index), payload, info.length);
    raise_version_anew(entry_index);
  }
  Replica* replica = replica_of(entry_index, record.node);
  const bool dropped = (record.flags & kDrop) != 0;
  if (!dropped && replica != nullptr && record.version != before)
    return refresh(entry_index, *replica, kAcks);
  if (replica != nullptr) replica->version = entry.version;
  put(record.node,
      {RecordKind::kAck, static_cast<std::uint8_t>(record.flags & kDrop), static_cast<std::uint16_t>(node_),
       0, record.key, entry.version, 0},
      nullptr, 0);
  if (!dropped || replica == nullptr) return;
  remove_replica(entry_index, record.node);
  consider_upgrade(entry_index);
}

// Under the entry's lock.
void Channel::owner_overwrite(std::int64_t entry_index, const Record& record, const std::byte* payload) {
  Entry& entry = store_->entry(entry_index);
  raise_version(entry_index);
  std::memcpy(store_->row(entry_index), payload, record.payload_bytes);
  raise_version_anew(entry_index);
  if (Replica* replica = replica_of(entry_index, record.node)) replica->version = entry.version;
  put(record.node, {RecordKind::kAck, 0, static_cast<std::uint16_t>(node_), 0, record.key, entry.version, 0},
      nullptr, 0);
}

}  // namespace torchrelay::parameters
