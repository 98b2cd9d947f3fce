// Requests for keys: served if the key is here, forwarded if elsewhere, parked if in flight to here.
#pragma once

#include <unordered_map>
#include <variant>
#include <vector>

#include "parameters/channel_state.h"
#include "parameters/request_codec.h"

namespace torchrelay::parameters {

class Evictor;
class OwnerSide;
class ReplicaSide;
class ReplySender;

class RequestRouter {
 public:
  RequestRouter(ChannelState& state, OwnerSide& owner, ReplicaSide& replicas, Evictor& evictor,
                ReplySender& replies)
      : state_(state), owner_(owner), replicas_(replicas), evictor_(evictor), replies_(replies) {}

  void handle_request(const Header& header, const Message& message);
  // A key of this home has moved to `record.node`.
  void handle_location(const Record& record);
  // Sends an acquire on to the owner, or parks it. Takes no lock: the caller may hold the entry's.
  void route(Record record);
  // The key has arrived: handles what was parked for it, in order of arrival. Takes the entry's
  // lock.
  void unpark(std::int64_t key);
  bool is_parked(std::int64_t key) const { return parked_.contains(key); }

 private:
  struct ParkedRequest {
    Message message;  // keeps what `request` points to
    KeyRequest request;
  };
  using Parked = std::variant<ParkedRequest, Record>;  // a Record is an acquire
  using ByNode = std::vector<std::vector<KeyRequest>>;
  // This node's owner lookup of a key.
  struct OwnerLookup {
    std::int64_t entry_index;  // -1: unknown, or forgotten
    std::uint32_t owner;
    std::uint32_t epoch;
  };

  // Serves what is here and replies; returns what is to be forwarded.
  ByNode serve(const Request& request, const Message& message);
  void forward(const RequestHead& head, const ByNode& by_node);
  // Writes, parks or adds to `by_node` a request for a key that is not owned here.
  void place_missed(KeyRequest request, const Message& message, ByNode& by_node);
  OwnerLookup look_up_owner(std::int64_t key) const;
  // Whether a request that was routed here with this epoch must wait, because the key is in flight to here.
  bool must_wait(const OwnerLookup& known, std::int64_t key, std::uint32_t epoch) const;
  void park(std::int64_t key, Parked parked);

  ChannelState& state_;
  OwnerSide& owner_;
  ReplicaSide& replicas_;
  Evictor& evictor_;
  ReplySender& replies_;
  std::unordered_map<std::int64_t, std::vector<Parked>> parked_;  // by key
};

}  // namespace torchrelay::parameters
