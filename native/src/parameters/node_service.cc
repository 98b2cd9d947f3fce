#include "torchrelay/parameters/node_service.h"

namespace torchrelay::parameters {

NodeService::NodeService(std::shared_ptr<Store> store, std::shared_ptr<Network> network,
                         const ChannelOptions& options)
    : store_(std::move(store)), network_(std::move(network)) {
  for (std::uint32_t channel_id = 0; channel_id < store_->header().num_channels; ++channel_id)
    channels_.push_back(std::make_unique<Channel>(store_, channel_id, *network_, options));
}

NodeService::~NodeService() {
  if (!threads_.empty()) store_->membership().leave_in_need();
  stop();
}

ChannelAddresses NodeService::addresses() const {
  ChannelAddresses addresses;
  for (const auto& channel : channels_) addresses.push_back(channel->address());
  return addresses;
}

void NodeService::start(const ChannelAddresses& addresses) {
  for (const auto& channel : channels_) channel->connect(addresses);
  for (const auto& channel : channels_) threads_.emplace_back([&channel = *channel] { channel.run(); });
}

void NodeService::stop() {
  store_->header().stopping = 1;
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace torchrelay::parameters
