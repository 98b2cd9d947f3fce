#include "parameters/sync_fence.h"

#include "parameters/owner_side.h"
#include "parameters/replica_side.h"

namespace torchrelay::parameters {

void SyncFence::serve() {
  Flush& flush = state_.store->header().boards[state_.channel_id].sync;
  if (target_ == 0 && flush.requested.load() != flush.done.load()) {
    target_ = flush.requested.load();
    begin_updates();
  }
  if (target_ != 0 && !is_refreshing_) {
    std::erase_if(unsent_, [this](UnsentReplica& replica) { return has_arrived(replica); });
    if (unsent_.empty()) begin_refreshes();
  }
  serve_fences();
  if (!is_refreshing_ || !own_fence_passed_ || flush_acks_missing_ != 0) return;
  flush.done.store(target_);
  target_ = 0;
  is_refreshing_ = false;
}

// Every replica that has something to send, or has sent something, when the flush begins: sent once more, and
// acknowledged.
void SyncFence::begin_updates() {
  unsent_.clear();
  for (const std::int64_t entry_index : replicas_.replicas())
    unsent_.push_back({.entry_index = entry_index, .sent = false});
}

bool SyncFence::has_arrived(UnsentReplica& replica) {
  LockedEntry entry = state_.lock(replica.entry_index);
  if (entry->state != State::kReplica) return true;
  if (const EntryControl& mine = state_.control(entry); mine.outstanding != 0 || mine.wanted) return false;
  if (replica.sent || !entry->has(kDirty)) return true;
  replicas_.sync(entry, true);
  replica.sent = true;
  return false;
}

void SyncFence::handle(const Header& header, const Message& message) {
  Reader reader(message.data() + sizeof(Header), message.size_bytes() - sizeof(Header));
  const auto round_id = reader.take<std::uint64_t>();
  switch (header.kind) {
    case Kind::kFence: return send(header.sender, Kind::kFenceAck, round_id);
    case Kind::kFenceAck:
      if (round_id == fence_id_ && fences_missing_ > 0) --fences_missing_;
      return;
    case Kind::kFlush:
      return waiting_for_next_fence_.push_back({.endpoint = header.sender, .round_id = round_id});
    default:
      if (round_id == flush_id_ && flush_acks_missing_ > 0) --flush_acks_missing_;
  }
}

// Every node refreshes the replicas of its keys, this one too.
void SyncFence::begin_refreshes() {
  is_refreshing_ = true;
  own_fence_passed_ = false;
  flush_acks_missing_ = send_to_all(Kind::kFlush, ++flush_id_);
  waiting_for_next_fence_.push_back({.endpoint = state_.endpoint.id(), .round_id = 0});
}

// Refreshes are followed by a fence; once every node has answered it, they have all arrived.
void SyncFence::serve_fences() {
  if (waiting_for_fence_.empty() && !waiting_for_next_fence_.empty()) {
    waiting_for_fence_.swap(waiting_for_next_fence_);
    owner_.refresh_all();
    state_.outbox.flush_all();
    fences_missing_ = send_to_all(Kind::kFence, ++fence_id_);
  }
  if (waiting_for_fence_.empty() || fences_missing_ != 0) return;
  for (const Waiter& waiter : waiting_for_fence_) {
    if (waiter.endpoint == state_.endpoint.id())
      own_fence_passed_ = true;
    else
      send(waiter.endpoint, Kind::kFlushAck, waiter.round_id);
  }
  waiting_for_fence_.clear();
}

void SyncFence::send(std::uint32_t endpoint, Kind kind, std::uint64_t round_id) {
  Writer writer(sizeof round_id);
  writer.put(round_id);
  state_.endpoint.send(endpoint, kind, 0, writer.finish());
}

std::uint32_t SyncFence::send_to_all(Kind kind, std::uint64_t round_id) {
  std::uint32_t sent = 0;
  for (std::uint32_t node = 0; node < state_.num_nodes(); ++node) {
    if (node == state_.node || state_.departed[node]) continue;
    send(channel_endpoint(node, state_.channel_id), kind, round_id);
    ++sent;
  }
  return sent;
}

}  // namespace torchrelay::parameters
