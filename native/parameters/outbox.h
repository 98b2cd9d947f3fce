// Records for other nodes' channels, sent in bundles: one message per node and turn of the channel.
#pragma once

#include <vector>

#include "parameters/reliable_endpoint.h"

namespace torchrelay::parameters {

class Outbox {
 public:
  Outbox(ReliableEndpoint& endpoint, std::uint32_t channel_id, std::uint32_t num_nodes)
      : endpoint_(endpoint), channel_id_(channel_id), bundles_(num_nodes) {}

  // Copies the record and its payload; sends the node's bundle once it is large.
  void put(std::uint32_t node, const Record& record, const void* payload = nullptr,
           std::size_t payload_bytes = 0);
  // Sends what was put. What is sent otherwise, and must not overtake records, comes after this.
  void flush(std::uint32_t node);
  void flush_all();

 private:
  struct Bundle {
    std::vector<std::byte> bytes;
    std::uint32_t count = 0;
  };

  ReliableEndpoint& endpoint_;
  std::uint32_t channel_id_;
  std::vector<Bundle> bundles_;  // by node
};

}  // namespace torchrelay::parameters
