// The other side of a channel: keys that come to this node, as its own or as replicas.
#include <algorithm>
#include <cmath>

#include "torchrelay/parameters/channel.h"

namespace torchrelay::parameters {

// An intent is a hint: where a dynamic table has no room for the key, it stays remote.
bool Channel::begin_intent(std::int64_t key) {
  try {
    while (!begin_intent_at(store_->find_or_make(channel_id_, key), key)) {
    }
    return true;
  } catch (const Error&) {
    return false;
  }
}

// False if the entry has become another key's meanwhile.
bool Channel::begin_intent_at(std::int64_t entry_index, std::int64_t key) {
  Entry& entry = store_->entry(entry_index);
  const LockGuard guard = store_->guard(entry, channel_id_);
  if (store_->key_of(entry_index) != key) return false;
  Control& mine = control(entry_index);
  if (mine.intents++ != 0) return true;
  pin(entry_index);
  if (entry.state == State::kAbsent && !mine.wanted) acquire(entry_index);
  return true;
}

// Under the entry's lock. What this channel keeps of an entry is by its place in the table, so as long as
// there is any, a dynamic table must not give the place to another key.
void Channel::pin(std::int64_t entry_index) {
  if (!store_->dynamic()) return;
  const Control& mine = control(entry_index);
  Entry& entry = store_->entry(entry_index);
  if (mine.intents != 0 || mine.wanted || mine.outstanding != 0)
    entry.raise(kPinned);
  else
    entry.lower(kPinned);
}

// Under the entry's lock.
void Channel::acquire(std::int64_t entry_index) {
  control(entry_index).wanted = true;
  const std::int64_t key = store_->key_of(entry_index);
  route({RecordKind::kAcquire, 0, static_cast<std::uint16_t>(node_),
         store_->ownership_epoch(entry_index).load(std::memory_order_relaxed), key, 0, 0});
}

void Channel::end_intent(std::int64_t key) {
  const std::int64_t entry_index = store_->find(key);
  Control& mine = control(entry_index);
  if (--mine.intents != 0) return;
  Entry& entry = store_->entry(entry_index);
  const LockGuard guard = store_->guard(entry, channel_id_);
  pin(entry_index);
  if (entry.state == State::kOwned) consider_upgrade(entry_index);
  if (entry.state == State::kReplica) mark_changed(entry_index);  // it is dropped by the round
}

void Channel::add_replica(std::int64_t entry_index) {
  control(entry_index).list_place = static_cast<std::uint32_t>(replicas_.size());
  replicas_.push_back(entry_index);
  mark_changed(entry_index);  // its intents may have ended meanwhile
}

void Channel::forget_replica(std::int64_t entry_index) {
  const std::uint32_t place = control(entry_index).list_place;
  if (place + 1 != replicas_.size()) {
    replicas_[place] = replicas_.back();
    control(replicas_[place]).list_place = place;
  }
  replicas_.pop_back();
  in_flight_.erase(entry_index);
}

void Channel::take_grant(const Record& record, const std::byte* payload) {
  const std::int64_t entry_index = store_->find_or_make(channel_id_, record.key);
  Entry& entry = store_->entry(entry_index);
  {
    const LockGuard guard = store_->guard(entry, channel_id_);
    Control& mine = control(entry_index);
    if (entry.state != State::kAbsent || !mine.wanted)
      throw Error(Code::kProtocol,
                  "parameters: a replica of key " + std::to_string(record.key) + " that was not asked for");
    mine.wanted = false;
    mine.overwritten = false;
    take_slot(entry_index);
    std::memcpy(store_->row(entry_index), payload, record.payload_bytes);
    std::memset(store_->accumulator(entry_index), 0, store_->class_of(entry_index).stride_bytes);
    entry.version = record.version;
    entry.owner = record.node;
    store_->ownership_epoch(entry_index).store(record.epoch, std::memory_order_release);
    entry.state = State::kReplica;
    add_replica(entry_index);
  }
  store_->count(channel_id_, kReplicasMade, 1);
  unpark(record.key);  // what was sent here by old knowledge, which this node had forgotten
}

void Channel::take_transfer(const Record& record, const std::byte* payload) {
  const std::int64_t entry_index = store_->find_or_make(channel_id_, record.key);
  Entry& entry = store_->entry(entry_index);
  {
    const LockGuard guard = store_->guard(entry, channel_id_);
    Control& mine = control(entry_index);
    if (entry.state == State::kOwned)
      throw Error(Code::kProtocol,
                  "parameters: key " + std::to_string(record.key) + " was sent to its owner");
    if (entry.state ==
        State::kReplica) {  // our updates under way go into the row, and are dropped where they arrive
      const ClassInfo& info = store_->class_of(entry_index);
      if (!mine.overwritten) {
        std::memcpy(store_->row(entry_index), payload, record.payload_bytes);
        if (const auto found = in_flight_.find(entry_index); found != in_flight_.end())
          store_->apply(store_->row(entry_index), found->second.data(), info.length);
        if (entry.has(kDirty))
          store_->apply(store_->row(entry_index), store_->accumulator(entry_index), info.length);
      }
      mine.outstanding = 0;
      mine.overwritten = false;
      forget_replica(entry_index);
      entry.lower(kDirty | kLeaving);
    } else {
      take_slot(entry_index);
      std::memcpy(store_->row(entry_index), payload, record.payload_bytes);
    }
    mine.wanted = false;
    mine.arrived = rounds_;
    entry.version = record.version;
    entry.owner = static_cast<std::uint16_t>(node_);
    store_->ownership_epoch(entry_index).store(record.epoch, std::memory_order_release);
    entry.state = State::kOwned;
    pin(entry_index);
  }
  store_->count(channel_id_, kRelocationsIn, 1);
  answer_overwrites(entry_index);
  unpark(record.key);
}

// A refresh lacks what has not been acknowledged before it: the update under way and the accumulator.
void Channel::take_refresh(const Record& record, const std::byte* payload) {
  const std::int64_t entry_index = store_->find(record.key);
  if (entry_index < 0 || store_->entry(entry_index).state != State::kReplica) return;
  Entry& entry = store_->entry(entry_index);
  const bool acks = (record.flags & kAcks) != 0;
  {
    const LockGuard guard = store_->guard(entry, channel_id_);
    Control& mine = control(entry_index);
    const bool last_ack = acks && mine.outstanding == 1;
    if (!mine.overwritten || last_ack) {
      const ClassInfo& info = store_->class_of(entry_index);
      std::memcpy(store_->row(entry_index), payload, record.payload_bytes);
      const auto found = in_flight_.find(entry_index);
      if (!acks && found != in_flight_.end())
        store_->apply(store_->row(entry_index), found->second.data(), info.length);
      if (entry.has(kDirty))
        store_->apply(store_->row(entry_index), store_->accumulator(entry_index), info.length);
      entry.version = record.version;
    }
    if (acks) settle_ack(entry_index, record.version);
  }
  if (acks) answer_overwrites(entry_index);
}

void Channel::take_ack(const Record& record) {
  const std::int64_t entry_index = store_->find(record.key);
  if (entry_index < 0) return;
  {
    const LockGuard guard = store_->guard(store_->entry(entry_index), channel_id_);
    settle_ack(entry_index, record.version);
  }
  answer_overwrites(entry_index);
  if (store_->entry(entry_index).state != State::kReplica) unpark(record.key);
}

// Under the entry's lock.
void Channel::settle_ack(std::int64_t entry_index, std::uint32_t version) {
  Control& mine = control(entry_index);
  Entry& entry = store_->entry(entry_index);
  if (entry.state != State::kReplica || mine.outstanding == 0)
    throw Error(Code::kProtocol, "parameters: an acknowledgement of nothing");
  if (--mine.outstanding != 0) return;
  mine.overwritten = false;
  entry.version = version;
  in_flight_.erase(entry_index);
  if (!entry.has(kLeaving)) return mark_changed(entry_index);  // what came meanwhile is sent by the round
  store_->free_slot(channel_id_, entry_index);
  entry.state = State::kAbsent;
  entry.lower(kLeaving);
  forget_replica(entry_index);
  pin(entry_index);
  if (entry.owner == node_) return begin_anew(entry_index);  // see take_eviction
  if (mine.intents != 0) acquire(entry_index);
  pin(entry_index);
}

// Under the entry's lock, with nothing outstanding.
void Channel::send_update(std::int64_t entry_index, bool last) {
  Entry& entry = store_->entry(entry_index);
  Control& mine = control(entry_index);
  const std::size_t size = store_->class_of(entry_index).length * size_of(store_->header().element);
  std::byte* accumulator = store_->accumulator(entry_index);
  const bool dirty = entry.has(kDirty);
  ++mine.outstanding;
  if (last) entry.raise(kLeaving);
  Record record{RecordKind::kUpdate,
                static_cast<std::uint8_t>(last ? kDrop : 0),
                static_cast<std::uint16_t>(node_),
                store_->ownership_epoch(entry_index).load(std::memory_order_relaxed),
                store_->key_of(entry_index),
                entry.version,
                0};
  put(entry.owner, record, accumulator, dirty ? size : 0);
  if (!dirty) return;
  in_flight_[entry_index].assign(accumulator, accumulator + size);
  std::memset(accumulator, 0, size);
  entry.lower(kDirty);
}

// Under the entry's lock.
void Channel::sync_replica(std::int64_t entry_index, bool force) {
  const Control& mine = control(entry_index);
  if (mine.outstanding != 0) return;  // the acknowledgement marks it anew
  if (mine.intents == 0) return send_update(entry_index, true);
  if (!store_->entry(entry_index).has(kDirty)) return;
  force || is_worth_sending(entry_index) ? send_update(entry_index, false) : mark_changed(entry_index);
}

// Under the entry's lock.
bool Channel::is_worth_sending(std::int64_t entry_index) const {
  if (options_.sync_threshold <= 0) return true;
  const double norm = squared_norm(store_->header().element, store_->accumulator(entry_index),
                                   store_->class_of(entry_index).length);
  return norm >= options_.sync_threshold * options_.sync_threshold;
}

}  // namespace torchrelay::parameters
