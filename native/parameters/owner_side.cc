#include "parameters/owner_side.h"

#include <algorithm>
#include <utility>

#include "parameters/request_router.h"

namespace torchrelay::parameters {
namespace {

constexpr std::uint32_t kOldestState = 16;  // versions behind, of the optimizer state of a replica
constexpr std::uint32_t kOldestLoan = 256;  // rounds, if its row has changed

}  // namespace

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
  if (entry_index >= 0) {
    LockedEntry entry = state_.lock(entry_index);
    if (entry.key() == record.key && entry->state == State::kOwned && record.epoch == entry.epoch())
      return record.kind == RecordKind::kUpdate ? apply_update(entry, record, payload)
                                                : apply_overwrite(entry, record, payload);
  }
  ++unsent_acks_[record.node];  // the replica has become the owner
}

// Relocate if no other node needs the key; else replicate (CIKM 2023, section 4). But for one use, a row with
// optimizer state is lent: its value and the gradient that returns are fewer bytes than the row there and
// back.
void OwnerSide::decide(LockedEntry& entry, const Record& record) {
  EntryControl& mine = state_.control(entry);
  if (record.node == state_.node) {  // we became the owner while our acquire was in flight
    mine.wanted = false;
    return;
  }
  const Techniques techniques = state_.options.techniques;
  const SharedKey* key = shared_key(entry.index());
  const bool nobody_else =
      mine.intents == 0 &&
      (key == nullptr || (key->replicas.size() == 1 && key->replicas.front().node == record.node));
  if (techniques == Techniques::kRelocationOnly ||
      (techniques == Techniques::kAll && nobody_else && is_worth_moving(entry, record)))
    return transfer(entry, record.node);
  grant(entry, record.node,
        techniques == Techniques::kAll && record.flags == 1 && entry.row_bytes() > entry.value_bytes());
}

// Moving costs the row, and once more when another node wants it; lending, the value and its gradient. A key
// moves once a node's loans, without another node's use between them, have cost that twice over.
bool OwnerSide::is_worth_moving(LockedEntry& entry, const Record& record) {
  EntryControl& mine = state_.control(entry);
  if (mine.borrower != record.node) mine.borrowed = 0;
  mine.borrower = record.node;
  mine.borrowed += record.flags;
  return entry.row_bytes() == entry.value_bytes() ||
         mine.borrowed * entry.value_bytes() > 2 * entry.row_bytes();
}

void OwnerSide::transfer(LockedEntry& entry, std::uint16_t node) {
  const std::int64_t key = entry.key();
  const std::uint32_t epoch = entry.epoch() + 1;
  send(node, {.kind = RecordKind::kTransfer, .node = state_.node, .epoch = epoch, .key = key}, entry, true);
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

void OwnerSide::grant(LockedEntry& entry, std::uint16_t node, bool lent) {
  raise_version(entry);
  if (shared_key(entry.index()) == nullptr) {
    entry->raise(kShared);
    state_.control(entry).list_place = static_cast<std::uint32_t>(shared_.size());
    shared_.push_back({.entry_index = entry.index(), .replicas = {}});
  }
  if (replica_of(entry.index(), node) == nullptr)
    shared_key(entry.index())->replicas.push_back({.node = node});
  Replica& replica = *replica_of(entry.index(), node);
  replica = {.node = node,
             .lent = lent,
             .version = entry->version,
             .row_version = entry->version,
             .sent_in = state_.rounds};
  send(node,
       {.kind = lent ? RecordKind::kLoan : RecordKind::kGrant,
        .node = state_.node,
        .epoch = entry.epoch(),
        .key = entry.key()},
       entry, !lent);
}

void OwnerSide::send(std::uint16_t node, const Record& record, const LockedEntry& entry, bool whole_row) {
  send_acks(node);
  state_.outbox.put(node, record, entry.row(), whole_row ? entry.row_bytes() : entry.value_bytes());
}

// Mostly of the value alone: a replica steps with a slightly older optimizer state until the owner's comes.
void OwnerSide::refresh(LockedEntry& entry, Replica& replica, unsigned flags) {
  replica.version = entry->version;
  replica.sent_in = state_.rounds;
  const bool stateless = entry.row_bytes() == entry.value_bytes();
  if (!replica.lent && (stateless || replica.version - replica.row_version >= kOldestState))
    flags |= kWholeRow;
  if (replica.lent || (flags & kWholeRow) != 0) {
    replica.row_version = replica.version;
    replica.has_stepped = false;
  }
  send(replica.node,
       {.kind = RecordKind::kRefresh,
        .flags = static_cast<std::uint8_t>(flags),
        .node = state_.node,
        .epoch = entry.epoch(),
        .key = entry.key()},
       entry, (flags & kWholeRow) != 0);
  state_.count(kRefreshes);
  refresh_age_ += ChannelState::Clock::now() - last_refreshes_;
}

void OwnerSide::refresh_replicas(LockedEntry& entry, bool all) {
  SharedKey* key = shared_key(entry.index());
  if (key == nullptr) return;
  raise_version(entry);
  for (Replica& replica : key->replicas) {
    const bool is_whole = replica.row_version == entry->version && !replica.has_stepped;
    if (replica.version == entry->version && (!all || is_whole)) continue;
    if (!all && replica.lent && state_.rounds - replica.sent_in < kOldestLoan)
      state_.mark_changed(entry.index());  // most loans are over soon
    else
      refresh(entry, replica, all && !replica.lent ? kWholeRow : kNoFlags);
  }
}

void OwnerSide::refresh_all() {
  for (const SharedKey& key : shared_) {
    LockedEntry entry = state_.lock(key.entry_index);
    refresh_replicas(entry, true);
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
  if (state_.options.techniques != Techniques::kAll || key == nullptr || key->replicas.size() != 1 ||
      key->replicas.front().lent)
    return;
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
  if ((record.flags & kEmpty) == 0) {
    entry.apply(payload);
    raise_version_anew(entry);
  }
  Replica* replica = replica_of(entry.index(), record.node);
  const bool dropped = (record.flags & kDrop) != 0;
  if (!dropped && replica != nullptr && replica->version != before) return refresh(entry, *replica, kAcks);
  if (replica != nullptr) {
    const bool is_exact = state_.store->header().dtype == Dtype::kInt64;
    replica->has_stepped |= entry->version != before && !is_exact;
    replica->has_written(before, entry->version);
  }
  ++unsent_acks_[record.node];
  if (!dropped || replica == nullptr) return;
  remove_replica(entry, record.node);
  consider_upgrade(entry);
}

void OwnerSide::apply_overwrite(LockedEntry& entry, const Record& record, const std::byte* payload) {
  raise_version(entry);
  const std::uint32_t before = entry->version;
  std::memcpy(entry.row(), payload,
              (record.flags & kWholeRow) != 0 ? entry.row_bytes() : entry.value_bytes());
  raise_version_anew(entry);
  if (Replica* replica = replica_of(entry.index(), record.node)) replica->has_written(before, entry->version);
  ++unsent_acks_[record.node];
}

void OwnerSide::send_acks(std::uint16_t node) {
  if (const std::uint32_t count = std::exchange(unsent_acks_[node], 0); count != 0)
    state_.outbox.put(node, {.kind = RecordKind::kAck, .node = state_.node, .epoch = count});
}

void OwnerSide::send_acks() {
  for (std::uint32_t node = 0; node < state_.num_nodes(); ++node) send_acks(static_cast<std::uint16_t>(node));
}

}  // namespace torchrelay::parameters
