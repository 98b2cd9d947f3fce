// Liveness of the other nodes: heartbeats, losses and departures.
#pragma once

#include <vector>

#include "parameters/channel_state.h"

namespace torchrelay::parameters {

class PeerMonitor {
 public:
  explicit PeerMonitor(ChannelState& state);

  // The channel begins to listen.
  void start();
  // A channel of the node has sent something.
  void heard_from(std::uint32_t node);
  // Sends heartbeats and checks for silent nodes when due.
  void beat();
  // Reports this node's loss to all others: at once, so that all name the first loss, not the nodes that
  // leave because of it; and once.
  void report_loss();
  void announce_departure();
  void handle_loss(const Message& message);
  void handle_goodbye(std::uint32_t node);

 private:
  void look_for_dead(std::uint32_t node);
  void lose(std::uint32_t node);

  ChannelState& state_;
  std::vector<ChannelState::Clock::time_point> last_heard_;  // by node
  std::vector<bool> refused_;  // by node: its host refused a connection at the last beat
  bool has_reported_loss_ = false;
  ChannelState::Clock::time_point next_beat_;
};

}  // namespace torchrelay::parameters
