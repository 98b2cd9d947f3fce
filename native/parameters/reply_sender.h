// Sends replies to workers: directly, or through their node's channel.
#pragma once

#include <unordered_map>
#include <vector>

#include "parameters/channel_state.h"
#include "parameters/request_codec.h"

namespace torchrelay::parameters {

class ReplySender {
 public:
  explicit ReplySender(ChannelState& state) : state_(state) {}

  // `count` is the request's. A worker that is not connected is answered through its own node's
  // channel; so is one whose node must get records first (`through_channel`).
  void send(std::uint32_t requester, std::uint32_t count, Message reply, bool through_channel);
  void acknowledge(const KeyRequest& request);
  // A reply to a worker of this node that another node's channel has sent here.
  void handle_relay(const Header& header, const Message& message);
  // Sends what waited for workers that are now connected.
  void send_waiting();

 private:
  struct Reply {
    std::uint32_t count;
    Message message;
  };

  void send_here(std::uint32_t worker, std::uint32_t count, Message reply);

  ChannelState& state_;
  std::unordered_map<std::uint32_t, std::vector<Reply>> waiting_;  // by worker, until it is connected
};

}  // namespace torchrelay::parameters
