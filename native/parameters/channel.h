// One channel of a node: the thread that serves other nodes' requests for its share of the keys, and that
// brings keys, or copies of them, to this node because its workers announced to need them.
//
// Only a key's channel moves it; workers only read and write local rows. Channels of equal id on all nodes
// exchange messages, in order and exactly once (reliable_endpoint.h). Invariants of the protocol:
//
//  * The owner has the master copy and decides. Messages to the owner are routed by (owner, epoch):
//    the epoch rises with each relocation, and the larger one is right. A node that owns a key but has
//    not received it yet parks requests for it.
//  * A key with replicas only moves to the one node that has the last. What a replica sends goes to the owner
//    that granted it, and is not sent on: if that is the owner no longer, the replica has become it, and its
//    row has all that it sent.
//  * A replica has a row and an accumulator. At most one update of it is in flight; its copy is kept until
//    the owner has acknowledged it, so that a refresh that was sent before the owner got it can be completed.
//  * A replica is given up by an update marked as its last. Until it is acknowledged the row stays and is
//    read: what a worker wrote, it reads. Pushes go to the owner from then on; a set waits for its end, so as
//    not to overtake what was pushed before.
//  * A row with optimizer state is lent for one use: a replica without that state, which is read until it is
//    pushed to. What is pushed is summed, and is the replica's last update. While the row is lent, it moves
//    to the borrower only, which then has no update in flight.
//  * A node has at most one acquire of a key in flight, and while it has one it sends no update of it.
//  * The owner acknowledges each node's updates and overwrites in the order in which they were sent.
//  * No worker reads a replica older than a value it has already received. An answer to a node that holds a
//    replica of the key goes through that node's channel, behind a refresh. Of a replica that is being given
//    up the owner may know no longer: an answer waits, at the worker, until the replica is gone.
//
// Each part of the channel is a class over its ChannelState: RequestRouter serves, forwards and parks
// requests, OwnerSide decides where keys go, ReplicaSide brings them here, SyncFence serves wait_sync,
// IntentBoard keeps announced intents, Evictor frees slots, PeerMonitor notices lost nodes, ReplySender
// answers workers. They call each other on the channel's thread; locks of entries are the only ones.
#pragma once

#include <memory>
#include <string>

#include "parameters/channel_state.h"
#include "parameters/evictor.h"
#include "parameters/intent_board.h"
#include "parameters/owner_side.h"
#include "parameters/peer_monitor.h"
#include "parameters/replica_side.h"
#include "parameters/reply_sender.h"
#include "parameters/request_router.h"
#include "parameters/sync_fence.h"
#include "parameters/worker.h"

namespace torchrelay::parameters {

class Channel {
 public:
  Channel(std::shared_ptr<Store> store, std::uint32_t channel_id, Network& network,
          const ChannelOptions& options);

  std::string address() const { return state_.endpoint.address(); }
  void connect(const ChannelAddresses& addresses);

  // Serves until the slab is stopped, then notifies the other nodes. Never throws: errors are written to the
  // slab, for the workers to raise.
  void run() noexcept;

 private:
  using Clock = ChannelState::Clock;

  void loop();
  // Handles what has arrived, or arrives before the next round.
  void receive();
  void handle(const Header& header, const Message& message);
  void handle_bundle(const Header& header, const Message& message);
  void handle_record(const Record& record, const std::byte* payload);
  // Of what follows the record. Throws kProtocol if the record is senseless.
  std::size_t payload_bytes(const Record& record) const;
  void round();
  void sync_changed();
  void publish_stats();

  ChannelState state_;
  ReplySender replies_;
  RequestRouter router_;
  Evictor evictor_;
  OwnerSide owner_;
  ReplicaSide replicas_;
  IntentBoard intents_;
  SyncFence fence_;
  PeerMonitor peers_;
  Clock::duration round_interval_;
  Clock::time_point next_round_, last_round_;
  Clock::duration in_rounds_{};        // the sum of all
  std::uint64_t reported_errors_ = 0;  // of the endpoint
};

}  // namespace torchrelay::parameters
