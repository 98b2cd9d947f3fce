// One channel of a node: the thread that answers other nodes about its share of the keys, and that brings
// keys here, or copies of them, because workers of this node announced to need them.
//
// Only a key's channel changes where it is; workers only read and write rows that are here. Channels of equal
// id on all nodes talk to each other, in order and exactly once (reliable_endpoint.h). What the protocol
// rests on:
//
//  * The owner has the master copy and decides. What is meant for the owner is routed by (owner, epoch):
//    the epoch rises with each relocation, and the larger one is right. A node that is told to own a key
//    it does not have yet parks what it is asked: the key is on its way to it.
//  * A key with replicas only moves to the one node that has the last. What a replica sends goes to the owner
//    that granted it, and is not sent on: if that is the owner no longer, the replica has become it, and its
//    row has all that it sent.
//  * A replica has a row and an accumulator. At most one update of it is under way; its copy is kept until
//    the owner has acknowledged it, so that a refresh that was sent before the owner got it can be completed.
//  * A replica is given up by an update marked as its last. Until it is acknowledged the row stays and is
//    read: what a worker wrote, it reads. Pushes go to the owner from then on; a set waits for its end, so as
//    not to overtake what was pushed before.
//  * No worker sees a replica older than what it has already been told. An answer to a node that holds a
//    replica of the key goes through that node's channel, behind a refresh. Of a replica that is being given
//    up the owner may know no longer: an answer waits, at the worker, until it is gone.
//
// Each part of the channel is a class over its ChannelState: RequestRouter serves, forwards and parks
// requests, OwnerSide decides where keys go, ReplicaSide brings them here, SyncFence serves wait_sync,
// IntentBoard keeps what workers announced, Evictor makes room, PeerMonitor notices lost nodes, ReplySender
// answers workers. They call each other on the channel's thread; locks of entries are the only ones.
#pragma once

#include <memory>
#include <string>

#include "torchrelay/parameters/channel_state.h"
#include "torchrelay/parameters/evictor.h"
#include "torchrelay/parameters/intent_board.h"
#include "torchrelay/parameters/owner_side.h"
#include "torchrelay/parameters/peer_monitor.h"
#include "torchrelay/parameters/replica_side.h"
#include "torchrelay/parameters/reply_sender.h"
#include "torchrelay/parameters/request_router.h"
#include "torchrelay/parameters/sync_fence.h"
#include "torchrelay/parameters/worker.h"

namespace torchrelay::parameters {

class Channel {
 public:
  Channel(std::shared_ptr<Store> store, std::uint32_t channel_id, Network& network,
          const ChannelOptions& options);

  std::string address() const { return state_.endpoint.address(); }
  void connect(const ChannelAddresses& addresses);

  // Serves until the slab says to stop; then says goodbye. Never throws: what goes wrong is written into the
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
  void check_record(const Record& record) const;
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
