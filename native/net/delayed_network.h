// Fault injection over any network: messages are delayed, reordered and duplicated before they are received.
//
// For tests and soaks, where the kernel cannot delay links. No message is lost; those in flight when
// an endpoint closes are not delivered.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "net/endpoint.h"

namespace torchrelay {

struct FaultInjection {
  // The longest delay. Most are close to zero, so that a delayed message is overtaken by others that make
  // several hops.
  std::chrono::microseconds max_delay{0};
  double duplicate_probability = 0;
  std::uint64_t seed = 0;
  std::chrono::microseconds min_delay{0};
};

class DelayedNetwork : public Network {
 public:
  DelayedNetwork(std::shared_ptr<Network> network, const FaultInjection& faults);
  std::unique_ptr<Endpoint> open(const std::string& label) override;

 private:
  std::shared_ptr<Network> network_;
  FaultInjection faults_;
  std::atomic<std::uint64_t> opened_ = 0;
};

}  // namespace torchrelay
