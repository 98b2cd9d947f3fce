// wait_sync: a worker asks that its node's updates arrive, and that all replicas become fresh.
#pragma once

#include <cstdint>
#include <vector>

#include "parameters/channel_state.h"

namespace torchrelay::parameters {

class OwnerSide;
class ReplicaSide;

class SyncFence {
 public:
  SyncFence(ChannelState& state, OwnerSide& owner, ReplicaSide& replicas)
      : state_(state), owner_(owner), replicas_(replicas) {}

  // Fences, flushes and their acknowledgements.
  void handle(const Header& header, const Message& message);
  // Once a turn of the channel.
  void serve();

 private:
  // Who is notified once all replicas of our keys are fresh: another node's channel, or (its id: ours) a
  // worker.
  struct Waiter {
    std::uint32_t endpoint;
    std::uint64_t round_id;
  };
  struct UnsentReplica {
    std::int64_t entry_index;
    bool sent;
  };

  bool has_arrived(UnsentReplica& replica);
  void begin_updates();
  void begin_refreshes();
  void serve_fences();
  void send(std::uint32_t endpoint, Kind kind, std::uint64_t round_id);
  // To the same channel of all other nodes that have not departed; returns how many.
  std::uint32_t send_to_all(Kind kind, std::uint64_t round_id);

  ChannelState& state_;
  OwnerSide& owner_;
  ReplicaSide& replicas_;
  std::vector<UnsentReplica> unsent_;
  std::uint64_t target_ = 0;    // what our workers have asked for; 0: nothing
  bool is_refreshing_ = false;  // their updates have arrived
  std::uint64_t flush_id_ = 0;
  std::uint32_t flush_acks_missing_ = 0;
  bool own_fence_passed_ = false;
  std::vector<Waiter> waiting_for_next_fence_, waiting_for_fence_;
  std::uint32_t fences_missing_ = 0;
  std::uint64_t fence_id_ = 0;
};

}  // namespace torchrelay::parameters
