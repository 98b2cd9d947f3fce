// The intents that this node's workers have announced to a channel.
#pragma once

#include <unordered_map>

#include "parameters/channel_state.h"
#include "parameters/intents.h"

namespace torchrelay::parameters {

class ReplicaSide;

class IntentBoard {
 public:
  IntentBoard(ChannelState& state, ReplicaSide& replicas) : state_(state), replicas_(replicas) {}

  void handle_intent(const Header& header, const Message& message);
  // Begins and ends intents by the workers' clocks.
  void round();
  // Whether a worker has intents that are not over.
  bool is_busy() const { return busy_; }

 private:
  // The announcements of one worker; a larger incarnation is another process under the same id.
  struct Announcer {
    std::uint32_t incarnation = 0;
    WorkerIntents intents;
  };

  void step(WorkerIntents& intents, std::int64_t clock);

  ChannelState& state_;
  ReplicaSide& replicas_;
  std::unordered_map<std::uint32_t, Announcer> announcers_;  // by user id
  ChannelState::Clock::time_point next_liveness_check_{};
  bool busy_ = false;
};

}  // namespace torchrelay::parameters
