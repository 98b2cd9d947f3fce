#include "parameters/reply_sender.h"

#include "core/error.h"

namespace torchrelay::parameters {

// We may have met the requester's predecessor: what is sent to that one's address is lost.
void ReplySender::send(std::uint32_t requester, std::uint32_t count, Message reply, bool through_channel) {
  if (!through_channel && state_.endpoint.has_met(requester, requester_incarnation(reply)))
    return state_.endpoint.send(requester, Kind::kReply, count, std::move(reply));
  const std::uint32_t node = node_of(requester);
  if (node == state_.node) return send_here(requester, count, std::move(reply));
  state_.outbox.flush(node);
  const std::size_t body = reply.size_bytes() - sizeof(Header);
  Writer writer(8 + body);
  writer.put(requester);
  writer.put(std::uint32_t{0});
  writer.put_bytes(reply.data() + sizeof(Header), body);
  state_.endpoint.send(channel_endpoint(node, state_.channel_id), Kind::kRelay, count, writer.finish());
}

void ReplySender::acknowledge(const KeyRequest& request) {
  send(request.head.requester, 1, encode_acknowledgement(request, state_.node), false);
}

void ReplySender::handle_relay(const Header& header, const Message& message) {
  Reader reader(message.data() + sizeof(Header), message.size_bytes() - sizeof(Header));
  const auto requester = reader.take<std::uint32_t>();
  reader.take<std::uint32_t>();
  if (node_of(requester) != state_.node || index_of(requester) >= kMaxWorkers)
    throw Error(Code::kProtocol, "parameters: an answer to a worker that is not of this node");
  Writer writer(reader.remaining());
  writer.put_bytes(reader.position(), reader.remaining());
  send_here(requester, header.count, writer.finish());
}

// To a worker of this node. What it asked another node may be answered before its introduction, which it sent
// here first, has been read.
void ReplySender::send_here(std::uint32_t worker, std::uint32_t count, Message reply) {
  if (state_.endpoint.has_met(worker, requester_incarnation(reply)))
    return state_.endpoint.send(worker, Kind::kReply, count, std::move(reply));
  waiting_[worker].push_back({count, std::move(reply)});
}

void ReplySender::send_waiting() {
  for (auto& [endpoint, replies] : waiting_)
    std::erase_if(replies, [this, worker = endpoint](Reply& reply) {
      const User& user = state_.store->users()[kMaxChannels + index_of(worker)];
      const std::uint32_t incarnation = requester_incarnation(reply.message);
      if (user.pid.load() == 0 || user.incarnation.load() != incarnation) return true;  // it has left
      if (!state_.endpoint.has_met(worker, incarnation)) return false;
      state_.endpoint.send(worker, Kind::kReply, reply.count, std::move(reply.message));
      return true;
    });
  std::erase_if(waiting_, [](const auto& waiting) { return waiting.second.empty(); });
}

}  // namespace torchrelay::parameters
