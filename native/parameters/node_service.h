// A node's channels, each in a thread of the leader process.
//
// Everything a thread needs exists before the first one starts.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/origin.h"
#include "parameters/channel.h"

namespace torchrelay::parameters {

class NodeService {
 public:
  NodeService(std::shared_ptr<Store> store, std::shared_ptr<Network> network, const ChannelOptions& options);
  // Stops; unless stop() was called, reports to the other nodes that this one left early. In a forked child
  // it does nothing, as stop().
  ~NodeService();
  NodeService(const NodeService&) = delete;
  NodeService& operator=(const NodeService&) = delete;

  // One address per channel.
  ChannelAddresses addresses() const;
  // Starts the threads; `addresses` are those of all channels of all nodes, in order.
  void start(const ChannelAddresses& addresses);
  // Notifies the other nodes and ends the threads.
  void stop();

 private:
  std::shared_ptr<Store> store_;
  std::shared_ptr<Network> network_;
  struct Parts {
    std::vector<std::unique_ptr<Channel>> channels;
    std::vector<std::thread> threads;
  };
  Origin origin_;
  ProcessOwned<Parts> parts_;
};

}  // namespace torchrelay::parameters
