// wait_sync: a worker asks that its node's updates arrive, and that all replicas become fresh.
#include "torchrelay/parameters/channel.h"

namespace torchrelay::parameters {

// Every replica that has something to send, or has sent something, when the flush begins: sent once more, and
// acknowledged.
void Channel::serve_flush_updates() {
  Flush& flush = store_->header().boards[channel_id_].updates;
  if (flush_updates_target_ == 0) {
    const std::uint64_t requested = flush.requested.load();
    if (requested == flush.done.load()) return;
    flush_updates_target_ = requested;
    flush_items_.clear();
    for (const std::int64_t entry_index : replicas_) flush_items_.push_back({entry_index, false});
  }
  std::erase_if(flush_items_, [this](FlushItem& item) {
    Entry& entry = store_->entry(item.entry_index);
    const LockGuard guard = store_->guard(entry, channel_id_);
    if (entry.state != State::kReplica) return true;
    if (control(item.entry_index).outstanding != 0) return false;
    if (item.sent || !entry.has(kDirty)) return true;
    sync_replica(item.entry_index, true);
    item.sent = true;
    return false;
  });
  if (!flush_items_.empty()) return;
  flush.done.store(flush_updates_target_);
  flush_updates_target_ = 0;
}

void Channel::handle_flush(const Header& header, const Message& message) {
  Reader reader(message.data() + sizeof(Header), message.size_bytes() - sizeof(Header));
  const auto round_id = reader.take<std::uint64_t>();
  switch (header.kind) {
    case Kind::kFence: return tell(header.sender, Kind::kFenceAck, round_id);
    case Kind::kFenceAck:
      if (round_id == fence_id_ && fences_missing_ > 0) --fences_missing_;
      return;
    case Kind::kFlush: return waiting_for_next_fence_.push_back({header.sender, round_id});
    default:
      if (round_id == flush_id_ && flush_acks_missing_ > 0) --flush_acks_missing_;
  }
}

// A worker's wait_sync: every node refreshes the replicas of its keys, this one too.
void Channel::serve_flush_refreshes() {
  Flush& flush = store_->header().boards[channel_id_].refreshes;
  if (flush_refreshes_target_ == 0) {
    const std::uint64_t requested = flush.requested.load();
    if (requested != flush.done.load()) {
      flush_refreshes_target_ = requested;
      own_fence_passed_ = false;
      flush_acks_missing_ = tell_all(Kind::kFlush, ++flush_id_);
      waiting_for_next_fence_.push_back({endpoint_.id(), 0});
    }
  }
  serve_fences();
  if (flush_refreshes_target_ == 0 || !own_fence_passed_ || flush_acks_missing_ != 0) return;
  flush.done.store(flush_refreshes_target_);
  flush_refreshes_target_ = 0;
}

// Refreshes are followed by a fence; once every node has answered it, they have all arrived.
void Channel::serve_fences() {
  if (waiting_for_fence_.empty() && !waiting_for_next_fence_.empty()) {
    waiting_for_fence_.swap(waiting_for_next_fence_);
    refresh_all();
    send_outboxes();
    fences_missing_ = tell_all(Kind::kFence, ++fence_id_);
  }
  if (waiting_for_fence_.empty() || fences_missing_ != 0) return;
  for (const FlushWaiter& waiter : waiting_for_fence_) {
    if (waiter.endpoint == endpoint_.id())
      own_fence_passed_ = true;
    else
      tell(waiter.endpoint, Kind::kFlushAck, waiter.round_id);
  }
  waiting_for_fence_.clear();
}

void Channel::tell(std::uint32_t endpoint, Kind kind, std::uint64_t round_id) {
  Writer writer(sizeof round_id);
  writer.put(round_id);
  endpoint_.send(endpoint, kind, 0, writer.finish());
}

// To the same channel of all other nodes that are still there; how many.
std::uint32_t Channel::tell_all(Kind kind, std::uint64_t round_id) {
  std::uint32_t told = 0;
  for (std::uint32_t node = 0; node < outboxes_.size(); ++node) {
    if (node == node_ || gone_[node]) continue;
    tell(channel_endpoint(node, channel_id_), kind, round_id);
    ++told;
  }
  return told;
}

}  // namespace torchrelay::parameters
