#include "torchrelay/parameters/replica_side.h"

#include "torchrelay/parameters/evictor.h"
#include "torchrelay/parameters/owner_side.h"
#include "torchrelay/parameters/reply_sender.h"
#include "torchrelay/parameters/request_router.h"

namespace torchrelay::parameters {

bool ReplicaSide::begin_intent(std::int64_t key) {
  Store& store = *state_.store;
  const auto find = [&] { return store.index().find_or_make(state_.channel_id, key); };
  try {
    return with_locked(store, key, state_.channel_id, find, [this](LockedEntry& entry) {
      EntryControl& mine = state_.control(entry);
      if (mine.intents++ != 0) return;
      state_.update_pin(entry);
      if (entry->state == State::kAbsent && !mine.wanted) acquire(entry);
    });
  } catch (const Error&) {  // there is no free slot
    return false;
  }
}

void ReplicaSide::acquire(LockedEntry& entry) {
  state_.control(entry).wanted = true;
  router_.route(
      {.kind = RecordKind::kAcquire, .node = state_.node, .epoch = entry.epoch(), .key = entry.key()});
}

void ReplicaSide::end_intent(std::int64_t key) {
  const std::int64_t entry_index = state_.store->index().find(key);
  if (--state_.control(entry_index).intents != 0) return;
  LockedEntry entry = state_.lock(entry_index);
  state_.update_pin(entry);
  if (entry->state == State::kOwned) owner_.consider_upgrade(entry);
  if (entry->state == State::kReplica) state_.mark_changed(entry_index);  // it is dropped by the round
}

void ReplicaSide::add_to_list(LockedEntry& entry) {
  state_.control(entry).list_place = static_cast<std::uint32_t>(replicas_.size());
  replicas_.push_back(entry.index());
}

void ReplicaSide::remove_from_list(LockedEntry& entry) {
  const std::uint32_t place = state_.control(entry).list_place;
  if (place + 1 != replicas_.size()) {
    replicas_[place] = replicas_.back();
    state_.control(replicas_[place]).list_place = place;
  }
  replicas_.pop_back();
  in_flight_.erase(entry.index());
}

void ReplicaSide::handle_grant(const Record& record, const std::byte* payload) {
  const std::int64_t entry_index = state_.store->index().find_or_make(state_.channel_id, record.key);
  {
    LockedEntry entry = state_.lock(entry_index);
    EntryControl& mine = state_.control(entry);
    if (entry->state != State::kAbsent || !mine.wanted)
      throw Error(Code::kProtocol,
                  "parameters: a replica of key " + std::to_string(record.key) + " that was not asked for");
    mine.wanted = false;
    mine.overwritten = false;
    evictor_.take_slot(entry);
    std::memcpy(entry.row(), payload, record.payload_bytes);
    std::memset(entry.accumulator(), 0, entry.row_class().stride_bytes);
    entry->version = record.version;
    entry.set_owner(record.node, record.epoch);
    entry->state = State::kReplica;
    add_to_list(entry);
    state_.mark_changed(entry_index);  // its intents may have ended meanwhile
  }
  state_.count(kReplicasMade);
  router_.unpark(record.key);  // what was sent here by old knowledge, which this node had forgotten
}

void ReplicaSide::handle_transfer(const Record& record, const std::byte* payload) {
  const std::int64_t entry_index = state_.store->index().find_or_make(state_.channel_id, record.key);
  {
    LockedEntry entry = state_.lock(entry_index);
    EntryControl& mine = state_.control(entry);
    if (entry->state == State::kOwned)
      throw Error(Code::kProtocol,
                  "parameters: key " + std::to_string(record.key) + " was sent to its owner");
    if (entry->state == State::kReplica) {
      // Our updates in flight are added to the row, and dropped on arrival.
      if (!mine.overwritten) take_row(entry, record, payload, true);
      mine.outstanding = 0;
      mine.overwritten = false;
      remove_from_list(entry);
      entry->lower(kDirty | kLeaving);
    } else {
      evictor_.take_slot(entry);
      std::memcpy(entry.row(), payload, record.payload_bytes);
    }
    mine.wanted = false;
    mine.arrived = state_.rounds;
    entry->version = record.version;
    entry.set_owner(state_.node, record.epoch);
    entry->state = State::kOwned;
    state_.update_pin(entry);
  }
  state_.count(kRelocationsIn);
  acknowledge_overwrites(entry_index);
  router_.unpark(record.key);
}

void ReplicaSide::take_row(LockedEntry& entry, const Record& record, const std::byte* payload,
                           bool lacks_in_flight) {
  std::memcpy(entry.row(), payload, record.payload_bytes);
  const auto found = in_flight_.find(entry.index());
  if (lacks_in_flight && found != in_flight_.end()) entry.apply(found->second.data());
  if (entry->has(kDirty)) entry.apply(entry.accumulator());
}

void ReplicaSide::handle_refresh(const Record& record, const std::byte* payload) {
  const std::int64_t entry_index = state_.store->index().find(record.key);
  if (entry_index < 0 || state_.store->entry(entry_index).state != State::kReplica) return;
  const bool acks = (record.flags & kAcks) != 0;
  {
    LockedEntry entry = state_.lock(entry_index);
    const EntryControl& mine = state_.control(entry);
    const bool last_ack = acks && mine.outstanding == 1;
    if (!mine.overwritten || last_ack) {
      take_row(entry, record, payload, !acks);
      entry->version = record.version;
    }
    if (acks) settle_ack(entry, record.version);
  }
  if (acks) acknowledge_overwrites(entry_index);
}

void ReplicaSide::handle_ack(const Record& record) {
  const std::int64_t entry_index = state_.store->index().find(record.key);
  if (entry_index < 0) return;
  {
    LockedEntry entry = state_.lock(entry_index);
    settle_ack(entry, record.version);
  }
  acknowledge_overwrites(entry_index);
  if (state_.store->entry(entry_index).state != State::kReplica) router_.unpark(record.key);
}

void ReplicaSide::settle_ack(LockedEntry& entry, std::uint32_t version) {
  EntryControl& mine = state_.control(entry);
  if (entry->state != State::kReplica || mine.outstanding == 0)
    throw Error(Code::kProtocol, "parameters: an acknowledgement without an update in flight");
  if (--mine.outstanding != 0) return;
  mine.overwritten = false;
  entry->version = version;
  in_flight_.erase(entry.index());
  if (entry->has(kLeaving)) return end_replica(entry);
  state_.mark_changed(entry.index());  // what came meanwhile is sent by the round
}

void ReplicaSide::end_replica(LockedEntry& entry) {
  state_.store->rows().free_slot(entry);
  entry->state = State::kAbsent;
  entry->lower(kLeaving);
  remove_from_list(entry);
  state_.update_pin(entry);
  if (entry->owner == state_.node) return evictor_.begin_anew(entry);  // see Evictor::handle_eviction
  if (state_.control(entry).intents != 0) acquire(entry);
  state_.update_pin(entry);
}

// With nothing outstanding.
void ReplicaSide::send_update(LockedEntry& entry, bool last) {
  const std::size_t size = entry.value_bytes();
  std::byte* accumulator = entry.accumulator();
  const bool dirty = entry->has(kDirty);
  ++state_.control(entry).outstanding;
  if (last) entry->raise(kLeaving);
  state_.outbox.put(entry->owner,
                    {.kind = RecordKind::kUpdate,
                     .flags = last ? kDrop : kNoFlags,
                     .node = state_.node,
                     .epoch = entry.epoch(),
                     .key = entry.key(),
                     .version = entry->version},
                    accumulator, dirty ? size : 0);
  if (!dirty) return;
  in_flight_[entry.index()].assign(accumulator, accumulator + size);
  std::memset(accumulator, 0, size);
  entry->lower(kDirty);
}

void ReplicaSide::sync(LockedEntry& entry, bool force) {
  const EntryControl& mine = state_.control(entry);
  if (mine.outstanding != 0) return;  // the acknowledgement marks it anew
  if (mine.intents == 0) return send_update(entry, true);
  if (!entry->has(kDirty)) return;
  force || is_worth_sending(entry) ? send_update(entry, false) : state_.mark_changed(entry.index());
}

bool ReplicaSide::is_worth_sending(const LockedEntry& entry) const {
  const double threshold = state_.options.sync_threshold;
  if (threshold <= 0) return true;
  return squared_norm(state_.store->header().dtype, entry.accumulator(), entry.row_class().length) >=
         threshold * threshold;
}

// Written here, and sent to the owner in order with this node's updates. What was pushed before it and not
// sent is overwritten anyway.
void ReplicaSide::overwrite(std::int64_t entry_index, const KeyRequest& request) {
  const Op op = static_cast<Op>(request.head.op);
  const std::size_t size = state_.store->value_bytes(op, request.key);
  LockedEntry entry = state_.lock(entry_index);
  EntryControl& mine = state_.control(entry);
  std::memcpy(entry.row(), request.value, size);
  std::memset(entry.accumulator(), 0, entry.row_class().stride_bytes);
  entry->lower(kDirty);
  in_flight_.erase(entry_index);
  mine.overwritten = true;
  ++mine.outstanding;
  state_.outbox.put(entry->owner,
                    {.kind = RecordKind::kOverwrite,
                     .flags = op == Op::kSetRow ? kWholeRow : kNoFlags,
                     .node = state_.node,
                     .epoch = entry.epoch(),
                     .key = request.key,
                     .version = entry->version},
                    request.value, size);
  overwrites_[entry_index].push_back(request);
}

// Once the owner has all overwrites of the key, acknowledge them to their workers.
void ReplicaSide::acknowledge_overwrites(std::int64_t entry_index) {
  const auto found = overwrites_.find(entry_index);
  if (found == overwrites_.end() || state_.control(entry_index).outstanding != 0) return;
  for (const KeyRequest& request : found->second) replies_.acknowledge(request);
  overwrites_.erase(found);
}

}  // namespace torchrelay::parameters
