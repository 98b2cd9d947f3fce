// The replica side of a channel: brings keys to this node, as owner or as replicas.
#pragma once

#include <unordered_map>
#include <vector>

#include "torchrelay/parameters/channel_state.h"
#include "torchrelay/parameters/request_codec.h"

namespace torchrelay::parameters {

class Evictor;
class OwnerSide;
class ReplySender;
class RequestRouter;

class ReplicaSide {
 public:
  ReplicaSide(ChannelState& state, OwnerSide& owner, RequestRouter& router, Evictor& evictor,
              ReplySender& replies)
      : state_(state), owner_(owner), router_(router), evictor_(evictor), replies_(replies) {}

  // A worker's intent becomes live; false if there is no slot for the key, which then stays remote.
  bool begin_intent(std::int64_t key);
  void end_intent(std::int64_t key);

  void handle_grant(const Record& record, const std::byte* payload);
  void handle_transfer(const Record& record, const std::byte* payload);
  void handle_refresh(const Record& record, const std::byte* payload);
  void handle_ack(const Record& record);

  // Sends what was pushed to the replica if it exceeds the threshold or `force`; gives the replica up if
  // no intent is live.
  void sync(LockedEntry& entry, bool force);
  // A worker of this node sets a key that is a replica here.
  void overwrite(std::int64_t entry_index, const KeyRequest& request);
  // The entries that are replicas.
  const std::vector<std::int64_t>& replicas() const { return replicas_; }

 private:
  void acquire(LockedEntry& entry);
  void send_update(LockedEntry& entry, bool last);
  bool is_worth_sending(const LockedEntry& entry) const;
  // Writes a row from the owner, and adds what the owner lacks: the accumulator and the update in flight.
  void take_row(LockedEntry& entry, const Record& record, const std::byte* payload, bool lacks_in_flight);
  void settle_ack(LockedEntry& entry, std::uint32_t version);
  void end_replica(LockedEntry& entry);
  void acknowledge_overwrites(std::int64_t entry_index);
  void add_to_list(LockedEntry& entry);
  void remove_from_list(LockedEntry& entry);

  ChannelState& state_;
  OwnerSide& owner_;
  RequestRouter& router_;
  Evictor& evictor_;
  ReplySender& replies_;
  std::vector<std::int64_t> replicas_;
  std::unordered_map<std::int64_t, std::vector<std::byte>> in_flight_;    // the update in flight, by entry
  std::unordered_map<std::int64_t, std::vector<KeyRequest>> overwrites_;  // to be acknowledged, by entry
};

}  // namespace torchrelay::parameters
