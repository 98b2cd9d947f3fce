#include "parameters/node_service.h"

namespace torchrelay::parameters {

NodeService::NodeService(std::shared_ptr<Store> store, std::shared_ptr<Network> network,
                         const ChannelOptions& options)
    : store_(std::move(store)), network_(std::move(network)), parts_(make_process_owned<Parts>()) {
  for (std::uint32_t channel_id = 0; channel_id < store_->header().num_channels; ++channel_id)
    parts_->channels.push_back(std::make_unique<Channel>(store_, channel_id, *network_, options));
}

NodeService::~NodeService() {
  if (origin_.is_forked()) return;
  if (!parts_->threads.empty()) store_->membership().abort_membership();
  stop();
}

ChannelAddresses NodeService::addresses() const {
  ChannelAddresses addresses;
  for (const auto& channel : parts_->channels) addresses.push_back(channel->address());
  return addresses;
}

void NodeService::start(const ChannelAddresses& addresses) {
  for (const auto& channel : parts_->channels) channel->connect(addresses);
  for (const auto& channel : parts_->channels)
    parts_->threads.emplace_back([&channel = *channel] { channel.run(); });
}

void NodeService::stop() {
  if (origin_.is_forked()) return;
  store_->header().stopping = 1;
  for (std::thread& thread : parts_->threads) thread.join();
  parts_->threads.clear();
}

}  // namespace torchrelay::parameters
