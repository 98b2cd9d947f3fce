// Bad weather over any network: what its endpoints receive is delayed, reordered and duplicated first.
//
// For tests and soaks, where the kernel cannot delay links. Nothing is lost, and what is under way when an
// endpoint closes was never delivered.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "torchrelay/memory_network.h"

namespace torchrelay {

class DelayedNetwork : public Network {
 public:
  DelayedNetwork(std::shared_ptr<Network> network, const Weather& weather);
  std::unique_ptr<Endpoint> open(const std::string& label) override;

 private:
  std::shared_ptr<Network> network_;
  Weather weather_;
  std::atomic<std::uint64_t> opened_ = 0;
};

}  // namespace torchrelay
