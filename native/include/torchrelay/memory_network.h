// The in-memory implementation of Network: endpoints of one process, for nodes as threads.
//
// Optionally delays, reorders and duplicates messages; never loses one.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>

#include "torchrelay/endpoint.h"

namespace torchrelay {

struct FaultInjection {
  std::chrono::microseconds max_delay{0};  // the longest delay; the distribution has a long tail
  double duplicate_probability = 0;
  std::uint64_t seed = 0;
  std::chrono::microseconds min_delay{0};

  // The delay of the next message. Most are close to zero, so that a delayed message is overtaken by others
  // that make several hops.
  std::chrono::microseconds delay(std::mt19937_64& random) const;
};

class MemoryNetwork : public Network {
 public:
  explicit MemoryNetwork(const FaultInjection& faults = {});
  ~MemoryNetwork() override;
  std::unique_ptr<Endpoint> open(const std::string& label) override;

  // From now on, messages to and from `label`'s endpoints are lost, as if the node had died.
  void cut(const std::string& label);

  struct Shared;

 private:
  std::shared_ptr<Shared> shared_;
};

}  // namespace torchrelay
