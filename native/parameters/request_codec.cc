#include "parameters/request_codec.h"

#include "core/error.h"

namespace torchrelay::parameters {
namespace {

constexpr std::uint32_t kMaxKeys = 1u << 28;  // of a request: more is nonsense

}  // namespace

Request decode_request(const Store& store, std::uint32_t channel_id, const Header& header,
                       const Message& message) {
  Reader reader(message.data() + sizeof(Header), message.size_bytes() - sizeof(Header));
  const auto head = reader.take<RequestHead>();
  const std::size_t count = header.count;
  if (head.op > static_cast<std::uint32_t>(Op::kSetRow) || count == 0 || count > kMaxKeys ||
      node_of(head.requester) >= store.header().num_nodes || (head.requester & kWorkerBit) == 0)
    throw Error(Code::kProtocol, "parameters: a malformed request");
  const Op op = static_cast<Op>(head.op);
  const auto* keys = reader.take_array<std::int64_t>(count);
  const auto* epochs = reinterpret_cast<const std::uint32_t*>(reader.take_bytes(padded(count * 4)));
  const auto* positions = reinterpret_cast<const std::uint32_t*>(reader.take_bytes(padded(count * 4)));
  const std::size_t value_bytes = store.value_bytes(op, keys, count);
  for (std::size_t i = 0; i < count; ++i)
    if (store.header().channel_of(keys[i]) != channel_id)
      throw Error(Code::kProtocol, "parameters: a request of another channel");
  return {.head = head,
          .op = op,
          .count = header.count,
          .keys = keys,
          .epochs = epochs,
          .positions = positions,
          .values = reads(op) ? nullptr : reader.take_bytes(value_bytes),
          .value_bytes = value_bytes};
}

Message encode_request(const Store& store, const RequestHead& head, const KeyRequest* requests,
                       std::size_t count) {
  const Op op = static_cast<Op>(head.op);
  std::size_t value_bytes = 0;
  for (std::size_t i = 0; i < count && !reads(op); ++i) value_bytes += store.value_bytes(op, requests[i].key);
  Writer writer(sizeof(RequestHead) + count * 8 + 2 * padded(count * 4) + value_bytes);
  writer.put(head);
  auto* keys = writer.array<std::int64_t>(count);
  auto* epochs = reinterpret_cast<std::uint32_t*>(writer.skip(padded(count * 4)));
  auto* positions = reinterpret_cast<std::uint32_t*>(writer.skip(padded(count * 4)));
  for (std::size_t i = 0; i < count; ++i) {
    keys[i] = requests[i].key;
    epochs[i] = requests[i].epoch;
    positions[i] = requests[i].position;
    if (!reads(op)) writer.put_bytes(requests[i].value, store.value_bytes(op, requests[i].key));
  }
  return writer.finish();
}

Message encode_acknowledgement(const KeyRequest& request, std::uint32_t node) {
  Writer writer(sizeof(ReplyHead) + 2 * padded(4));
  writer.put(
      ReplyHead{.request_id = request.head.request_id, .owner = node, .op = request.head.op, .served = 1});
  std::memcpy(writer.skip(padded(4)), &request.position, 4);
  std::memset(writer.skip(padded(4)), 0, padded(4));  // the epoch
  return writer.finish();
}

std::uint32_t requester_incarnation(const Message& reply) {
  Reader reader(reply.data() + sizeof(Header), reply.size_bytes() - sizeof(Header));
  return incarnation_of(reader.take<ReplyHead>().request_id);
}

ReplyWriter::ReplyWriter(const Request& request)
    : request_(request),
      writer_(sizeof(ReplyHead) + 2 * padded(request.count * 4) +
              (reads(request.op) ? request.value_bytes : 0)) {
  head_ = reinterpret_cast<ReplyHead*>(writer_.skip(sizeof(ReplyHead)));
  positions_ = reinterpret_cast<std::uint32_t*>(writer_.skip(padded(request.count * 4)));
  epochs_ = reinterpret_cast<std::uint32_t*>(writer_.skip(padded(request.count * 4)));
  values_ = writer_.position();
}

void ReplyWriter::add(std::size_t i, std::uint32_t epoch, std::size_t offset, std::size_t size_bytes) {
  positions_[served_] = request_.positions[i];
  epochs_[served_++] = epoch;
  if (!reads(request_.op)) return;
  std::byte* to = writer_.skip(size_bytes);
  if (to != values_ + offset) std::memmove(to, values_ + offset, size_bytes);
}

Message ReplyWriter::finish(std::uint32_t node) {
  *head_ = {.request_id = request_.head.request_id, .owner = node, .op = request_.head.op, .served = served_};
  return writer_.finish();
}

}  // namespace torchrelay::parameters
