// The owner's side of a channel: who gets a key, who gets a copy, and keeping the copies fresh.
#include <algorithm>

#include "torchrelay/parameters/channel.h"

namespace torchrelay::parameters {

Channel::SharedKey* Channel::shared(std::int64_t number) {
  return !store_->entry(number).has(kShared) ? nullptr : &shared_[control(number).list_place];
}

Channel::Replica* Channel::replica_of(std::int64_t number, std::uint32_t node) {
  SharedKey* key = shared(number);
  if (key == nullptr) return nullptr;
  const auto found = std::ranges::find(key->replicas, node, &Replica::node);
  return found == key->replicas.end() ? nullptr : &*found;
}

// Under the entry's lock. Whoever changed the row has marked the entry, and no round has come to it since.
void Channel::raise_version(std::int64_t number) {
  Entry& entry = store_->entry(number);
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
  std::int64_t number = -1;
  do {
    number = make ? store_->find_or_try_make(number_, record.key) : store_->find(record.key);
    if (number < 0) return route(record);
  } while (!take_acquire_at(number, record));
}

// False if the entry has become another key's meanwhile.
bool Channel::take_acquire_at(std::int64_t number, const Record& record) {
  Entry& entry = store_->entry(number);
  const LockGuard guard = store_->guard(entry, number_);
  if (store_->key_of(number) != record.key) return false;
  entry.state == State::kOwned ? owner_acquire(number, record) : route(record);
  return true;
}

// By the counter we tell whether the replica is one that we granted since we own the key.
void Channel::take_from_replica(const Record& record, const std::byte* payload) {
  const std::int64_t number = store_->find(record.key);
  if (number < 0) return;
  Entry& entry = store_->entry(number);
  const LockGuard guard = store_->guard(entry, number_);
  if (store_->key_of(number) != record.key || entry.state != State::kOwned ||
      record.counter != store_->location_counter(number).load(std::memory_order_relaxed))
    return;  // the replica has become the owner
  record.kind == RecordKind::kUpdate ? owner_update(number, record, payload)
                                     : owner_overwrite(number, record, payload);
}

// Under the entry's lock. Relocate where nobody else needs the key; else replicate (CIKM 2023, section 4).
void Channel::owner_acquire(std::int64_t number, const Record& record) {
  Control& mine = control(number);
  if (record.node == node_) {  // we became the owner while our wish was under way
    mine.wanted = false;
    return;
  }
  const bool nobody_else = shared(number) == nullptr && mine.intents == 0;
  const bool relocate = options_.techniques == Techniques::kRelocationOnly ||
                        (options_.techniques == Techniques::kAll && nobody_else);
  relocate ? transfer(number, record.node) : grant(number, record.node);
}

// Under the entry's lock.
void Channel::transfer(std::int64_t number, std::uint32_t node) {
  Entry& entry = store_->entry(number);
  const std::int64_t key = store_->key_of(number);
  const ClassInfo& info = store_->class_of(number);
  const std::uint32_t counter = store_->location_counter(number).load(std::memory_order_relaxed) + 1;
  Record record{RecordKind::kTransfer, 0, static_cast<std::uint16_t>(node_), counter, key, entry.version, 0};
  put(node, record, store_->row(number), info.row_length * size_of(store_->header().element));
  if (shared(number) != nullptr) remove_replica(number, node);
  store_->free_slot(number_, number);
  entry.state = State::kAbsent;
  entry.put(kUsed);  // what is under way to us must still find where to go
  pin(number);
  entry.owner = static_cast<std::uint16_t>(node);
  store_->location_counter(number).store(counter, std::memory_order_release);
  const std::uint32_t home = store_->home_of(key);
  if (home == node_ || home == node) return;
  put(home, {RecordKind::kLocation, 0, static_cast<std::uint16_t>(node), counter, key, 0, 0}, nullptr, 0);
}

// Under the entry's lock.
void Channel::grant(std::int64_t number, std::uint32_t node) {
  Entry& entry = store_->entry(number);
  raise_version(number);
  if (shared(number) == nullptr) {
    entry.raise(kShared);
    control(number).list_place = static_cast<std::uint32_t>(shared_.size());
    shared_.push_back({number, {}});
  }
  if (replica_of(number, node) == nullptr) shared(number)->replicas.push_back({node, entry.version});
  const ClassInfo& info = store_->class_of(number);
  put(node,
      {RecordKind::kGrant, 0, static_cast<std::uint16_t>(node_),
       store_->location_counter(number).load(std::memory_order_relaxed), store_->key_of(number),
       entry.version, 0},
      store_->row(number), info.row_length * size_of(store_->header().element));
}

// Under the entry's lock.
void Channel::refresh(std::int64_t number, Replica& replica, std::uint8_t flags) {
  const Entry& entry = store_->entry(number);
  const ClassInfo& info = store_->class_of(number);
  replica.version = entry.version;
  put(replica.node,
      {RecordKind::kRefresh, flags, static_cast<std::uint16_t>(node_), 0, store_->key_of(number),
       entry.version, 0},
      store_->row(number), info.row_length * size_of(store_->header().element));
  store_->count(number_, kRefreshes, 1);
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
    const LockGuard guard = store_->guard(store_->entry(key.number), number_);
    refresh_replicas(key.number);
  }
  last_refresh_all_ = Clock::now();
}

// Under the entry's lock.
void Channel::remove_replica(std::int64_t number, std::uint32_t node) {
  SharedKey* key = shared(number);
  if (key == nullptr) return;
  std::erase_if(key->replicas, [node](const Replica& replica) { return replica.node == node; });
  if (!key->replicas.empty()) return;
  Entry& entry = store_->entry(number);
  entry.lower(kShared | kChanged);
  const std::uint32_t place = control(number).list_place;
  if (place + 1 != shared_.size()) {
    shared_[place] = std::move(shared_.back());
    control(shared_[place].number).list_place = place;
  }
  shared_.pop_back();
}

// Under the entry's lock: the only node that still needs the key becomes its owner.
void Channel::consider_upgrade(std::int64_t number) {
  const SharedKey* key = shared(number);
  if (options_.techniques != Techniques::kAll || key == nullptr || key->replicas.size() != 1) return;
  const Control& mine = control(number);
  if (mine.intents != 0) return;
  if (rounds_ - mine.arrived < options_.hysteresis_rounds)
    reconsider_.push_back(number);
  else
    transfer(number, key->replicas.front().node);
}

// Under the entry's lock.
void Channel::owner_update(std::int64_t number, const Record& record, const std::byte* payload) {
  Entry& entry = store_->entry(number);
  const ClassInfo& info = store_->class_of(number);
  raise_version(number);
  const std::uint32_t before = entry.version;
  if (record.payload_bytes != 0) {
    store_->apply(store_->row(number), payload, info.length);
    raise_version_anew(number);
  }
  Replica* replica = replica_of(number, record.node);
  const bool dropped = (record.flags & kDrop) != 0;
  if (!dropped && replica != nullptr && record.version != before) return refresh(number, *replica, kAcks);
  if (replica != nullptr) replica->version = entry.version;
  put(record.node,
      {RecordKind::kAck, static_cast<std::uint8_t>(record.flags & kDrop), static_cast<std::uint16_t>(node_),
       0, record.key, entry.version, 0},
      nullptr, 0);
  if (!dropped || replica == nullptr) return;
  remove_replica(number, record.node);
  consider_upgrade(number);
}

// Under the entry's lock.
void Channel::owner_overwrite(std::int64_t number, const Record& record, const std::byte* payload) {
  Entry& entry = store_->entry(number);
  raise_version(number);
  std::memcpy(store_->row(number), payload, record.payload_bytes);
  raise_version_anew(number);
  if (Replica* replica = replica_of(number, record.node)) replica->version = entry.version;
  put(record.node, {RecordKind::kAck, 0, static_cast<std::uint16_t>(node_), 0, record.key, entry.version, 0},
      nullptr, 0);
}

}  // namespace torchrelay::parameters
