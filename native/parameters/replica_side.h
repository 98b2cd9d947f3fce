// The replica side of a channel: brings keys to this node, as owner or as replicas.
#pragma once

#include <deque>
#include <unordered_map>
#include <vector>

#include "parameters/channel_state.h"
#include "parameters/request_codec.h"

namespace torchrelay::parameters {

class Evictor;
class OwnerSide;
class ReplySender;
class RequestRouter;

class ReplicaSide {
 public:
  ReplicaSide(ChannelState& state, OwnerSide& owner, RequestRouter& router, Evictor& evictor,
              ReplySender& replies)
      : state_(state),
        owner_(owner),
        router_(router),
        evictor_(evictor),
        replies_(replies),
        written_(state.num_nodes()) {}

  // A worker's intent becomes live; false if there is no slot for the key, which then stays remote.
  bool begin_intent(std::int64_t key, std::int64_t clocks);
  void end_intent(std::int64_t key);

  void handle_grant(const Record& record, const std::byte* payload);
  void handle_transfer(const Record& record, const std::byte* payload);
  void handle_refresh(const Record& record, const std::byte* payload);
  void handle_ack(const Record& record);

  // Sends what was pushed to the replica if it exceeds the threshold or `force`; gives the replica up if
  // no intent is live, or if it is a loan that was used or is to be given up by `force`.
  void sync(LockedEntry& entry, bool force);
  // Sends what was pushed to the replica, ahead of a request to the owner; gives a loan up.
  void send_ahead(std::int64_t entry_index);
  // A worker of this node sets a key that is a replica here.
  void overwrite(std::int64_t entry_index, const KeyRequest& request);
  // The entries that are replicas.
  const std::vector<std::int64_t>& replicas() const { return replicas_; }

 private:
  void acquire(LockedEntry& entry);
  void send_update(LockedEntry& entry, bool last);
  bool is_worth_sending(const LockedEntry& entry) const;
  // Writes a row from the owner, or its value alone, and adds what the owner lacks: the accumulator and the
  // update in flight.
  void take_row(LockedEntry& entry, const std::byte* payload, std::size_t size_bytes, bool lacks_in_flight);
  void send_write(LockedEntry& entry, RecordKind kind, unsigned flags, const std::byte* payload,
                  std::size_t size_bytes);
  void take_ack(std::uint16_t node);
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
  // The keys of updates and overwrites not acknowledged, by owner; kNoKey: the key has come here instead.
  std::vector<std::deque<std::int64_t>> written_;
  std::unordered_map<std::int64_t, std::vector<std::byte>> in_flight_;    // the update in flight, by entry
  std::unordered_map<std::int64_t, std::vector<KeyRequest>> overwrites_;  // to be acknowledged, by entry
};

}  // namespace torchrelay::parameters
