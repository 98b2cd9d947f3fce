// The in-memory implementation of Network: endpoints of one process, for nodes as threads.
#pragma once

#include <memory>
#include <string>

#include "net/endpoint.h"

namespace torchrelay {

class MemoryNetwork : public Network {
 public:
  MemoryNetwork();
  ~MemoryNetwork() override;
  std::unique_ptr<Endpoint> open(const std::string& label) override;

  // From now on, messages to and from `label`'s endpoints are lost, as if the node had died.
  void cut(const std::string& label);

  struct Shared;

 private:
  std::shared_ptr<Shared> shared_;
};

}  // namespace torchrelay
