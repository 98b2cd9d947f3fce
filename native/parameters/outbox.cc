#include "parameters/outbox.h"

namespace torchrelay::parameters {
namespace {

constexpr std::size_t kLargeBytes = std::size_t{256} << 10;  // of a bundle that is sent at once

}  // namespace

void Outbox::put(std::uint32_t node, const Record& record, const void* payload, std::size_t payload_bytes) {
  Bundle& bundle = bundles_[node];
  const std::size_t at = bundle.bytes.size();
  bundle.bytes.resize(at + sizeof record + payload_bytes);
  std::memcpy(bundle.bytes.data() + at, &record, sizeof record);
  if (payload_bytes != 0) std::memcpy(bundle.bytes.data() + at + sizeof record, payload, payload_bytes);
  ++bundle.count;
  if (bundle.bytes.size() >= kLargeBytes) flush(node);
}

void Outbox::flush(std::uint32_t node) {
  Bundle& bundle = bundles_[node];
  if (bundle.count == 0) return;
  Writer writer(bundle.bytes.size());
  writer.put_bytes(bundle.bytes.data(), bundle.bytes.size());
  endpoint_.send(channel_endpoint(node, channel_id_), Kind::kBundle, bundle.count, writer.finish());
  bundle.bytes.clear();
  bundle.count = 0;
}

void Outbox::flush_all() {
  for (std::uint32_t node = 0; node < bundles_.size(); ++node) flush(node);
}

}  // namespace torchrelay::parameters
