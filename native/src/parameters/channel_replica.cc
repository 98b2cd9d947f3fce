// The other side of a channel: keys that come to this node, as its own or as replicas.
#include <algorithm>
#include <cmath>

#include "torchrelay/parameters/channel.h"

namespace torchrelay::parameters {

// An intent is a hint: where a dynamic table has no room for the key, it stays remote.
bool Channel::begin_intent(std::int64_t key) {
  try {
    while (!begin_intent_at(store_->find_or_make(number_, key), key)) {
    }
    return true;
  } catch (const Error&) {
    return false;
  }
}

// False if the entry has become another key's meanwhile.
bool Channel::begin_intent_at(std::int64_t number, std::int64_t key) {
  Entry& entry = store_->entry(number);
  const LockGuard guard = store_->guard(entry, number_);
  if (store_->key_of(number) != key) return false;
  Control& mine = control(number);
  if (mine.intents++ != 0) return true;
  pin(number);
  if (entry.state == State::kAbsent && !mine.wanted) acquire(number);
  return true;
}

// Under the entry's lock. What this channel keeps of an entry is by its place in the table, so as long as
// there is any, a dynamic table must not give the place to another key.
void Channel::pin(std::int64_t number) {
  if (!store_->dynamic()) return;
  const Control& mine = control(number);
  Entry& entry = store_->entry(number);
  if (mine.intents != 0 || mine.wanted || mine.outstanding != 0)
    entry.raise(kPinned);
  else
    entry.lower(kPinned);
}

// Under the entry's lock.
void Channel::acquire(std::int64_t number) {
  control(number).wanted = true;
  const std::int64_t key = store_->key_of(number);
  route({RecordKind::kAcquire, 0, static_cast<std::uint16_t>(node_),
         store_->location_counter(number).load(std::memory_order_relaxed), key, 0, 0});
}

void Channel::end_intent(std::int64_t key) {
  const std::int64_t number = store_->find(key);
  Control& mine = control(number);
  if (--mine.intents != 0) return;
  Entry& entry = store_->entry(number);
  const LockGuard guard = store_->guard(entry, number_);
  pin(number);
  if (entry.state == State::kOwned) consider_upgrade(number);
  if (entry.state == State::kReplica) mark_changed(number);  // it is dropped by the round
}

void Channel::add_replica(std::int64_t number) {
  control(number).list_place = static_cast<std::uint32_t>(replicas_.size());
  replicas_.push_back(number);
  mark_changed(number);  // its intents may have ended meanwhile
}

void Channel::forget_replica(std::int64_t number) {
  const std::uint32_t place = control(number).list_place;
  if (place + 1 != replicas_.size()) {
    replicas_[place] = replicas_.back();
    control(replicas_[place]).list_place = place;
  }
  replicas_.pop_back();
  in_flight_.erase(number);
}

void Channel::take_grant(const Record& record, const std::byte* payload) {
  const std::int64_t number = store_->find_or_make(number_, record.key);
  Entry& entry = store_->entry(number);
  {
    const LockGuard guard = store_->guard(entry, number_);
    Control& mine = control(number);
    if (entry.state != State::kAbsent || !mine.wanted)
      throw Error(Code::kProtocol,
                  "parameters: a replica of key " + std::to_string(record.key) + " that was not asked for");
    mine.wanted = false;
    mine.overwritten = false;
    take_slot(number);
    std::memcpy(store_->row(number), payload, record.payload_bytes);
    std::memset(store_->accumulator(number), 0, store_->class_of(number).stride_bytes);
    entry.version = record.version;
    entry.owner = record.node;
    store_->location_counter(number).store(record.counter, std::memory_order_release);
    entry.state = State::kReplica;
    add_replica(number);
  }
  store_->count(number_, kReplicasMade, 1);
  unpark(record.key);  // what was sent here by old knowledge, which this node had forgotten
}

void Channel::take_transfer(const Record& record, const std::byte* payload) {
  const std::int64_t number = store_->find_or_make(number_, record.key);
  Entry& entry = store_->entry(number);
  {
    const LockGuard guard = store_->guard(entry, number_);
    Control& mine = control(number);
    if (entry.state == State::kOwned)
      throw Error(Code::kProtocol,
                  "parameters: key " + std::to_string(record.key) + " was sent to its owner");
    if (entry.state ==
        State::kReplica) {  // our updates under way go into the row, and are dropped where they arrive
      const ClassInfo& info = store_->class_of(number);
      if (!mine.overwritten) {
        std::memcpy(store_->row(number), payload, record.payload_bytes);
        if (const auto found = in_flight_.find(number); found != in_flight_.end())
          store_->apply(store_->row(number), found->second.data(), info.length);
        if (entry.has(kDirty)) store_->apply(store_->row(number), store_->accumulator(number), info.length);
      }
      mine.outstanding = 0;
      mine.overwritten = false;
      forget_replica(number);
      entry.lower(kDirty | kLeaving);
    } else {
      take_slot(number);
      std::memcpy(store_->row(number), payload, record.payload_bytes);
    }
    mine.wanted = false;
    mine.arrived = rounds_;
    entry.version = record.version;
    entry.owner = static_cast<std::uint16_t>(node_);
    store_->location_counter(number).store(record.counter, std::memory_order_release);
    entry.state = State::kOwned;
    pin(number);
  }
  store_->count(number_, kRelocationsIn, 1);
  answer_overwrites(number);
  unpark(record.key);
}

// A refresh lacks what has not been acknowledged before it: the update under way and the accumulator.
void Channel::take_refresh(const Record& record, const std::byte* payload) {
  const std::int64_t number = store_->find(record.key);
  if (number < 0 || store_->entry(number).state != State::kReplica) return;
  Entry& entry = store_->entry(number);
  const bool acks = (record.flags & kAcks) != 0;
  {
    const LockGuard guard = store_->guard(entry, number_);
    Control& mine = control(number);
    const bool last_ack = acks && mine.outstanding == 1;
    if (!mine.overwritten || last_ack) {
      const ClassInfo& info = store_->class_of(number);
      std::memcpy(store_->row(number), payload, record.payload_bytes);
      const auto found = in_flight_.find(number);
      if (!acks && found != in_flight_.end())
        store_->apply(store_->row(number), found->second.data(), info.length);
      if (entry.has(kDirty)) store_->apply(store_->row(number), store_->accumulator(number), info.length);
      entry.version = record.version;
    }
    if (acks) settle_ack(number, record.version);
  }
  if (acks) answer_overwrites(number);
}

void Channel::take_ack(const Record& record) {
  const std::int64_t number = store_->find(record.key);
  if (number < 0) return;
  {
    const LockGuard guard = store_->guard(store_->entry(number), number_);
    settle_ack(number, record.version);
  }
  answer_overwrites(number);
  if (store_->entry(number).state != State::kReplica) unpark(record.key);
}

// Under the entry's lock.
void Channel::settle_ack(std::int64_t number, std::uint32_t version) {
  Control& mine = control(number);
  Entry& entry = store_->entry(number);
  if (entry.state != State::kReplica || mine.outstanding == 0)
    throw Error(Code::kProtocol, "parameters: an acknowledgement of nothing");
  if (--mine.outstanding != 0) return;
  mine.overwritten = false;
  entry.version = version;
  in_flight_.erase(number);
  if (!entry.has(kLeaving)) return mark_changed(number);  // what came meanwhile is sent by the round
  store_->free_slot(number_, number);
  entry.state = State::kAbsent;
  entry.lower(kLeaving);
  forget_replica(number);
  pin(number);
  if (entry.owner == node_) return begin_anew(number);  // see take_eviction
  if (mine.intents != 0) acquire(number);
  pin(number);
}

// Under the entry's lock, with nothing outstanding.
void Channel::send_update(std::int64_t number, bool last) {
  Entry& entry = store_->entry(number);
  Control& mine = control(number);
  const std::size_t size = store_->class_of(number).length * size_of(store_->header().element);
  std::byte* accumulator = store_->accumulator(number);
  const bool dirty = entry.has(kDirty);
  ++mine.outstanding;
  if (last) entry.raise(kLeaving);
  Record record{RecordKind::kUpdate,
                static_cast<std::uint8_t>(last ? kDrop : 0),
                static_cast<std::uint16_t>(node_),
                store_->location_counter(number).load(std::memory_order_relaxed),
                store_->key_of(number),
                entry.version,
                0};
  put(entry.owner, record, accumulator, dirty ? size : 0);
  if (!dirty) return;
  in_flight_[number].assign(accumulator, accumulator + size);
  std::memset(accumulator, 0, size);
  entry.lower(kDirty);
}

// Under the entry's lock.
void Channel::sync_replica(std::int64_t number, bool force) {
  const Control& mine = control(number);
  if (mine.outstanding != 0) return;  // the acknowledgement marks it anew
  if (mine.intents == 0) return send_update(number, true);
  if (!store_->entry(number).has(kDirty)) return;
  force || is_worth_sending(number) ? send_update(number, false) : mark_changed(number);
}

// Under the entry's lock.
bool Channel::is_worth_sending(std::int64_t entry_index) const {
  if (options_.sync_threshold <= 0) return true;
  const double norm = squared_norm(store_->header().element, store_->accumulator(entry_index),
                                   store_->class_of(entry_index).length);
  return norm >= options_.sync_threshold * options_.sync_threshold;
}

}  // namespace torchrelay::parameters
