#include "parameters/replica_side.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "parameters/evictor.h"
#include "parameters/owner_side.h"
#include "parameters/reply_sender.h"
#include "parameters/request_router.h"

namespace torchrelay::parameters {
namespace {

constexpr std::uint32_t kManyUses = 255;  // are as good as more

void add_uses(EntryControl& control, std::int64_t clocks) {
  control.uses = static_cast<std::uint32_t>(std::min<std::int64_t>(control.uses + clocks, kManyUses));
}

}  // namespace

bool ReplicaSide::begin_intent(std::int64_t key, std::int64_t clocks) {
  Store& store = *state_.store;
  const auto find = [&] { return store.index().find_or_make(state_.channel_id, key); };
  try {
    return with_locked(store, key, state_.channel_id, find, [this, clocks](LockedEntry& entry) {
      EntryControl& mine = state_.control(entry);
      const bool is_served = mine.uses == 0;  // loans have served all earlier intents
      add_uses(mine, std::min<std::int64_t>(clocks, kManyUses));
      mine.borrowed = 0;
      if (mine.intents++ == 0) state_.update_pin(entry);
      const bool lacks =
          entry->state == State::kAbsent ? is_served : entry->has(kLent) && !entry->has(kLeaving);
      if (lacks && !mine.wanted) acquire(entry);
    });
  } catch (const Error&) {  // there is no free slot
    return false;
  }
}

void ReplicaSide::acquire(LockedEntry& entry) {
  EntryControl& mine = state_.control(entry);
  mine.wanted = true;
  router_.route({.kind = RecordKind::kAcquire,
                 .flags = static_cast<std::uint8_t>(mine.uses),
                 .node = state_.node,
                 .epoch = entry.epoch(),
                 .key = entry.key()});
}

void ReplicaSide::end_intent(std::int64_t key) {
  const std::int64_t entry_index = state_.store->index().find(key);
  EntryControl& mine = state_.control(entry_index);
  if (--mine.intents != 0) return;
  mine.uses = 0;
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
    if (!mine.wanted || (entry->state != State::kAbsent && !entry->has(kLent)))
      throw Error(Code::kProtocol,
                  "parameters: a replica of key " + std::to_string(record.key) + " that was not asked for");
    mine.wanted = false;
    mine.overwritten = false;
    if (entry->state == State::kAbsent) {
      evictor_.take_slot(entry);
      std::memset(entry.accumulator(), 0, entry.value_bytes());
      entry.set_owner(record.node, record.epoch);
      entry->state = State::kReplica;
      add_to_list(entry);
    }
    if (record.kind == RecordKind::kLoan) {
      entry->raise(kLent);
      take_row(entry, payload, entry.value_bytes(), false);
      if (mine.uses > 1) acquire(entry);  // announced since: one loan is not enough
    } else {
      entry->lower(kLent);
      take_row(entry, payload, entry.row_bytes(), false);
    }
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
      entry->lower(kLent);
      if (!mine.overwritten) take_row(entry, payload, entry.row_bytes(), true);
      if (std::exchange(mine.outstanding, 0) != 0)
        std::ranges::replace(written_[record.node], record.key, kNoKey);
      mine.overwritten = false;
      remove_from_list(entry);
      entry->lower(kDirty | kLeaving);
    } else {
      evictor_.take_slot(entry);
      std::memcpy(entry.row(), payload, entry.row_bytes());
    }
    mine.wanted = false;
    mine.arrived = state_.rounds;
    mine.borrowed = 0;
    entry.set_owner(state_.node, record.epoch);
    entry->state = State::kOwned;
    state_.update_pin(entry);
  }
  state_.count(kRelocationsIn);
  acknowledge_overwrites(entry_index);
  router_.unpark(record.key);
}

void ReplicaSide::take_row(LockedEntry& entry, const std::byte* payload, std::size_t size_bytes,
                           bool lacks_in_flight) {
  std::memcpy(entry.row(), payload, size_bytes);
  if (entry->has(kLent)) return;  // once pushed to, it is not read
  const auto found = in_flight_.find(entry.index());
  const bool adds_in_flight = lacks_in_flight && found != in_flight_.end();
  if (!adds_in_flight && !entry->has(kDirty)) return;
  // The optimizer state that stays has these pushes.
  std::byte* const kept = entry.row() + size_bytes;
  const std::vector<std::byte> state(kept, entry.row() + entry.row_bytes());
  if (adds_in_flight) entry.apply(found->second.data());
  if (entry->has(kDirty)) entry.apply(entry.accumulator());
  std::ranges::copy(state, kept);
}

void ReplicaSide::handle_refresh(const Record& record, const std::byte* payload) {
  const std::int64_t entry_index = state_.store->index().find(record.key);
  const bool acks = (record.flags & kAcks) != 0;
  if (entry_index >= 0 && state_.store->entry(entry_index).state == State::kReplica) {
    LockedEntry entry = state_.lock(entry_index);
    const EntryControl& mine = state_.control(entry);
    const bool last_ack = acks && mine.outstanding == 1;
    const std::size_t size = (record.flags & kWholeRow) != 0 ? entry.row_bytes() : entry.value_bytes();
    if (!mine.overwritten || last_ack) take_row(entry, payload, size, !acks);
  }
  if (acks) take_ack(record.node);
}

void ReplicaSide::handle_ack(const Record& record) {
  for (std::uint32_t i = 0; i < record.epoch; ++i) take_ack(record.node);
}

void ReplicaSide::take_ack(std::uint16_t node) {
  if (written_[node].empty())
    throw Error(Code::kProtocol, "parameters: an acknowledgement without an update in flight");
  const std::int64_t key = written_[node].front();
  written_[node].pop_front();
  if (key == kNoKey) return;
  const std::int64_t entry_index = state_.store->index().find(key);
  {
    LockedEntry entry = state_.lock(entry_index);
    EntryControl& mine = state_.control(entry);
    if (--mine.outstanding != 0) return;
    mine.overwritten = false;
    in_flight_.erase(entry_index);
    if (entry->has(kLeaving))
      end_replica(entry);
    else
      state_.mark_changed(entry_index);  // what came meanwhile is sent by the round
  }
  acknowledge_overwrites(entry_index);
  if (state_.store->entry(entry_index).state != State::kReplica) router_.unpark(key);
}

void ReplicaSide::end_replica(LockedEntry& entry) {
  state_.store->rows().free_slot(entry);
  entry->state = State::kAbsent;
  EntryControl& mine = state_.control(entry);
  if (entry->has(kLent) && mine.uses > 0) --mine.uses;
  entry->lower(kLeaving | kLent);
  remove_from_list(entry);
  state_.update_pin(entry);
  if (entry->owner == state_.node) return evictor_.begin_anew(entry);  // see Evictor::handle_eviction
  if (mine.intents != 0 && mine.uses != 0) acquire(entry);
  state_.update_pin(entry);
}

void ReplicaSide::send_write(LockedEntry& entry, RecordKind kind, unsigned flags, const std::byte* payload,
                             std::size_t size_bytes) {
  ++state_.control(entry).outstanding;
  written_[entry->owner].push_back(entry.key());
  state_.outbox.put(entry->owner,
                    {.kind = kind,
                     .flags = static_cast<std::uint8_t>(flags),
                     .node = state_.node,
                     .epoch = entry.epoch(),
                     .key = entry.key()},
                    payload, size_bytes);
}

// With nothing outstanding.
void ReplicaSide::send_update(LockedEntry& entry, bool last) {
  const std::size_t size = entry.value_bytes();
  std::byte* accumulator = entry.accumulator();
  const bool dirty = entry->has(kDirty);
  if (last) entry->raise(kLeaving);
  send_write(entry, RecordKind::kUpdate, (last ? kDrop : kNoFlags) | (dirty ? kNoFlags : kEmpty), accumulator,
             dirty ? size : 0);
  if (!dirty) return;
  in_flight_[entry.index()].assign(accumulator, accumulator + size);
  std::memset(accumulator, 0, size);
  entry->lower(kDirty);
}

void ReplicaSide::sync(LockedEntry& entry, bool force) {
  const EntryControl& mine = state_.control(entry);
  if (mine.outstanding != 0) return;  // the acknowledgement marks it anew
  if (mine.wanted) return;            // so does the row
  if (entry->has(kLent) && (force || entry->has(kDirty))) return send_update(entry, true);
  if (mine.intents == 0) return send_update(entry, true);
  if (!entry->has(kDirty)) return;
  force || is_worth_sending(entry) ? send_update(entry, false) : state_.mark_changed(entry.index());
}

void ReplicaSide::send_ahead(std::int64_t entry_index) {
  LockedEntry entry = state_.lock(entry_index);
  EntryControl& mine = state_.control(entry);
  if (entry->has(kLent) && mine.intents != 0) add_uses(mine, 2);  // used again: a loan is not enough
  sync(entry, true);
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
  send_write(entry, RecordKind::kOverwrite, op == Op::kSetRow ? kWholeRow : kNoFlags, request.value, size);
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
