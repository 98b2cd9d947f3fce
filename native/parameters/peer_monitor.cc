#include "parameters/peer_monitor.h"

#include <algorithm>

#include "core/error.h"

namespace torchrelay::parameters {

PeerMonitor::PeerMonitor(ChannelState& state)
    : state_(state),
      last_heard_(state.num_nodes(), ChannelState::Clock::now()),
      refused_(state.num_nodes(), false) {}

void PeerMonitor::start() {
  next_beat_ = ChannelState::Clock::now();
  std::ranges::fill(last_heard_, next_beat_);
}

void PeerMonitor::heard_from(std::uint32_t node) {
  last_heard_[node] = ChannelState::Clock::now();
  if (state_.channel_id == 0) state_.store->header().heard[node].store(1, std::memory_order_relaxed);
}

void PeerMonitor::beat() {
  const auto now = ChannelState::Clock::now();
  if (now < next_beat_) return;
  const auto timeout = state_.options.heartbeat_timeout;
  // A process that was stopped has received nothing: it waits again before it reports others as lost.
  const bool was_stopped = now - next_beat_ > timeout / 2;
  if (was_stopped) {
    std::ranges::fill(last_heard_, now);
    state_.endpoint.forgive_gaps();
  }
  next_beat_ = now + state_.options.heartbeat_interval;
  // A node of which a channel failed falls silent, so that the others hear of it.
  if (state_.channel_id != 0 || state_.store->header().failed.load() != 0) return;
  for (std::uint32_t node = 0; node < state_.num_nodes(); ++node) {
    if (node == state_.node || state_.departed[node]) continue;
    state_.endpoint.send(channel_endpoint(node, 0), Kind::kHeartbeat, 0, Writer(0).finish());
    look_for_dead(node);
  }
  const std::int64_t stuck = state_.endpoint.stuck_peer(timeout);
  if (stuck >= 0) lose(node_of(static_cast<std::uint32_t>(stuck)));
}

// Where connections are refused there is no such process any more. What it said last may still be unread.
void PeerMonitor::look_for_dead(std::uint32_t node) {
  const bool was_refused = refused_[node];
  refused_[node] = state_.endpoint.is_refused(channel_endpoint(node, 0));
  const bool is_silent = ChannelState::Clock::now() - last_heard_[node] > state_.options.heartbeat_timeout;
  if (is_silent || (was_refused && refused_[node])) lose(node);
}

void PeerMonitor::lose(std::uint32_t node) {
  state_.store->membership().lose({.how = Loss::kUnreachable, .node = static_cast<std::uint16_t>(node)});
}

void PeerMonitor::report_loss() {
  const Loss loss = state_.store->membership().loss();
  if (has_reported_loss_ || loss.how == Loss::kNone) return;
  has_reported_loss_ = true;
  for (std::uint32_t node = 0; node < state_.num_nodes(); ++node) {
    if (node == state_.node) continue;
    Writer writer(sizeof loss);
    writer.put(loss);
    state_.endpoint.send(channel_endpoint(node, state_.channel_id), Kind::kLoss, 0, writer.finish());
  }
}

void PeerMonitor::handle_loss(const Message& message) {
  const auto loss =
      Reader(message.data() + sizeof(Header), message.size_bytes() - sizeof(Header)).take<Loss>();
  if (loss.how == Loss::kNone || loss.how > Loss::kFailed || loss.node >= state_.num_nodes())
    throw Error(Code::kProtocol, "parameters: a malformed loss");
  state_.store->membership().lose(loss);
}

void PeerMonitor::announce_departure() {
  state_.outbox.flush_all();
  report_loss();
  for (std::uint32_t node = 0; node < state_.num_nodes(); ++node)
    if (node != state_.node)
      state_.endpoint.send(channel_endpoint(node, state_.channel_id), Kind::kGoodbye, 0, Writer(0).finish());
}

// All leave together, after a barrier; a process that still needs a departed node names it.
void PeerMonitor::handle_goodbye(std::uint32_t node) {
  state_.departed[node] = true;
  std::uint32_t nobody = 0;
  state_.store->header().departed_node.compare_exchange_strong(nobody, node + 1);
}

}  // namespace torchrelay::parameters
