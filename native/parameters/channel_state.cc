#include "parameters/channel_state.h"

namespace torchrelay::parameters {

ChannelState::ChannelState(std::shared_ptr<Store> the_store, std::uint32_t id, Network& network,
                           const ChannelOptions& the_options)
    : store(std::move(the_store)),
      channel_id(id),
      node(static_cast<std::uint16_t>(store->header().node)),
      options(the_options),
      endpoint(network.open("node" + std::to_string(node)), channel_endpoint(node, channel_id), 1),
      outbox(endpoint, channel_id, num_nodes()),
      changed(store->changed(channel_id)),
      controls(store->header().channel_entries),
      departed(num_nodes(), false) {}

void ChannelState::update_pin(LockedEntry& entry) {
  if (!store->header().dynamic()) return;
  const EntryControl& mine = control(entry);
  if (mine.intents != 0 || mine.wanted || mine.outstanding != 0)
    entry->raise(kPinned);
  else
    entry->lower(kPinned);
}

}  // namespace torchrelay::parameters
