// Which announced accesses are due: action timing of "Good Intentions" (Renz-Wieland et al., CIKM 2023).
//
// A worker announces keys for clocks [start, end). A channel looks at clocks once a round and acts on an
// intent in the last round that is sure (to 0.9999) to come before the worker reaches its start, taking ticks
// as a Poisson process whose rate is estimated from past rounds.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

namespace torchrelay::parameters {

// The smallest k with P(X <= k) >= probability, X ~ Poisson(mean); the normal approximation above a mean of
// 1e6.
std::int64_t poisson_quantile(double mean, double probability);

// How many clocks ahead to look; fed once a round with the ticks since the last one.
class TickEstimate {
 public:
  std::int64_t window(std::int64_t ticks);

 private:
  double rate_ = 10;
  double computed_for_ = -1;
  std::int64_t window_ = 0;
};

// The intents of one worker for the keys of one channel.
class WorkerIntents {
 public:
  // Of a key and a number of clocks. False: not done, and not to be undone.
  using Begin = std::function<bool(std::int64_t, std::int64_t)>;
  using Expire = std::function<void(std::int64_t)>;

  void announce(std::int64_t start, std::int64_t end, std::vector<std::int64_t> keys);
  // One round at `clock`: `begin` is called for each key whose intent becomes live, `expire` for each whose
  // ended. Ends come after beginnings, so that a key wanted again is not given up between.
  void round(std::int64_t clock, const Begin& begin, const Expire& expire);
  bool empty() const { return future_.empty() && live_.empty(); }

 private:
  struct Announced {
    std::int64_t end;
    std::vector<std::int64_t> keys;
  };
  std::multimap<std::int64_t, Announced> future_;                // by start
  std::multimap<std::int64_t, std::vector<std::int64_t>> live_;  // by end
  TickEstimate estimate_;
  std::int64_t last_clock_ = 0;
};

}  // namespace torchrelay::parameters
