// The in-memory filling of Network: endpoints of one process, for nodes as threads.
//
// On demand it delays, reorders and duplicates, as a bad network would; it never loses a message.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>

#include "torchrelay/endpoint.h"

namespace torchrelay {

struct Weather {
  std::chrono::microseconds max_delay{0};  // the longest wait, which most messages are far from: they reorder
  double duplicate_probability = 0;
  std::uint64_t seed = 0;
  std::chrono::microseconds min_delay{0};

  // Of the next message. Most wait for next to nothing, so that one that does not is overtaken by others over
  // several hops.
  std::chrono::microseconds delay(std::mt19937_64& random) const;
};

class MemoryNetwork : public Network {
 public:
  explicit MemoryNetwork(const Weather& weather = {});
  ~MemoryNetwork() override;
  std::unique_ptr<Endpoint> open(const std::string& label) override;

  // From now on nothing that `label`'s endpoints send or are sent arrives: a node that died.
  void cut(const std::string& label);

  struct Shared;

 private:
  std::shared_ptr<Shared> shared_;
};

}  // namespace torchrelay
