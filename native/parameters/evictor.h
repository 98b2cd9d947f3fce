// Frees slots in dynamic tables: a node evicts relocated rows that are no longer used, and asks other
// nodes to do the same for keys of its home.
#pragma once

#include <vector>

#include "parameters/channel_state.h"

namespace torchrelay::parameters {

class RequestRouter;

class Evictor {
 public:
  Evictor(ChannelState& state, RequestRouter& router) : state_(state), router_(router) {}

  // A key of this home was evicted where it was.
  void handle_eviction(const Record& record);
  // The key's home has no entry left for a key that is elsewhere.
  void handle_recall(const Record& record);

  // Once a round.
  void make_room();
  bool is_making_room() const { return making_room_; }
  // Takes a slot for the entry's row; evicts others if there is none. Throws kUnavailable if it cannot.
  void take_slot(LockedEntry& entry);
  // An evicted key of this home begins anew: at once if a request waits for it, else at
  // its next use.
  void begin_anew(LockedEntry& entry);
  // A request is parked for a key of this home that has no slot.
  void await_room(std::int64_t key) { without_room_.push_back(key); }

 private:
  void evict_moved(std::uint64_t places);
  void report_eviction(std::int64_t key, std::uint32_t epoch);

  ChannelState& state_;
  RequestRouter& router_;
  std::uint64_t eviction_cursor_ = 0, recall_cursor_ = 0;
  bool making_room_ = false;
  std::vector<std::int64_t> without_room_;
};

}  // namespace torchrelay::parameters
