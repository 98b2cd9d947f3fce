#include "parameters/reliable_endpoint.h"

#include "core/error.h"
#include "parameters/slab_layout.h"

namespace torchrelay::parameters {
namespace {

constexpr std::size_t kMaxEarly = 100000;  // beyond this the peer is hostile or broken
constexpr std::size_t kMaxAddressBytes = 1024;

Header header_of(const Message& message) {
  Header header;
  std::memcpy(&header, message.data(), sizeof header);
  return header;
}

}  // namespace

ReliableEndpoint::ReliableEndpoint(std::unique_ptr<Endpoint> endpoint, std::uint32_t id,
                                   std::uint32_t incarnation)
    : endpoint_(std::move(endpoint)), id_(id), incarnation_(incarnation) {}

void ReliableEndpoint::connect(std::uint32_t peer, const std::string& address) {
  endpoint_->connect(peer, address);
  peers_.try_emplace(peer);
}

bool ReliableEndpoint::has_met(std::uint32_t peer, std::uint32_t incarnation) const {
  const auto stream = incoming_.find(peer);
  return knows(peer) && stream != incoming_.end() && stream->second.incarnation == incarnation;
}

void ReliableEndpoint::send(std::uint32_t peer, Kind kind, std::uint32_t count, Message message) {
  const auto found = peers_.find(peer);
  if (found == peers_.end())
    throw Error(Code::kArgument, "parameters: endpoint " + std::to_string(peer) + " is not known here");
  greet(peer);
  send_numbered(peer, found->second, kind, count, std::move(message));
}

void ReliableEndpoint::greet(std::uint32_t peer) {
  Outgoing& outgoing = peers_.at(peer);
  if (outgoing.greeted) return;
  const std::string mine = address();
  Writer writer(mine.size());
  writer.put_bytes(mine.data(), mine.size());
  outgoing.greeted = true;
  send_numbered(peer, outgoing, Kind::kHello, 0, writer.finish());
}

void ReliableEndpoint::send_numbered(std::uint32_t peer, Outgoing& outgoing, Kind kind, std::uint32_t count,
                                     Message message) {
  const Header header{kProtocolMagic | kProtocolVersion, id_, incarnation_, outgoing.next, kind, 0, count};
  std::memcpy(message.data(), &header, sizeof header);
  const std::size_t size = message.size_bytes();
  endpoint_->send(peer, std::move(message));
  ++outgoing.next;  // a message that was too large to be sent leaves no gap
  if (node_of(peer) == node_of(id_)) return;
  sent_bytes += size;
  ++sent_messages;
}

bool ReliableEndpoint::valid(const Message& message, Header& header) {
  if (message.size_bytes() >= sizeof(Header)) {
    header = header_of(message);
    if (header.magic == (kProtocolMagic | kProtocolVersion) && node_of(header.sender) < kMaxNodes)
      return true;
  }
  ++protocol_errors;
  return false;
}

void ReliableEndpoint::accept(const Header& header, const Message& message) {
  if (node_of(header.sender) != node_of(id_)) {
    received_bytes += message.size_bytes();
    ++received_messages;
  }
  if (header.kind != Kind::kHello) return ready_.push_back(message);
  const std::size_t size = message.size_bytes() - sizeof(Header);
  if (size > kMaxAddressBytes) {
    ++protocol_errors;
    return;
  }
  if (knows(header.sender)) return;
  try {  // who greets us can be answered
    connect(header.sender, {reinterpret_cast<const char*>(message.data() + sizeof(Header)), size});
  } catch (const Error&) {
    ++protocol_errors;
  }
}

void ReliableEndpoint::sort_in(const Message& message) {
  Header header;
  if (!valid(message, header)) return;
  Incoming& stream = incoming_[header.sender];
  if (header.incarnation > stream.incarnation) {
    stream = Incoming{};
    stream.incarnation = header.incarnation;
    if ((header.sender & kWorkerBit) != 0) {  // a new worker under an old id: its new address comes
      peers_.erase(header.sender);
      endpoint_->disconnect(header.sender);
    }
  }
  const bool seen = header.incarnation < stream.incarnation || header.sequence < stream.next ||
                    stream.early.contains(header.sequence);
  if (seen) {
    ++duplicates;
    return;
  }
  if (header.sequence != stream.next) {
    if (stream.early.empty()) stream.early_since = std::chrono::steady_clock::now();
    if (stream.early.size() < kMaxEarly) stream.early.emplace(header.sequence, message);
    return;
  }
  accept(header, message);
  ++stream.next;
  while (!stream.early.empty() && stream.early.begin()->first == stream.next) {
    const Message next = stream.early.begin()->second;
    stream.early.erase(stream.early.begin());
    accept(header_of(next), next);
    ++stream.next;
    stream.early_since = std::chrono::steady_clock::now();
  }
}

bool ReliableEndpoint::receive(Header& header, Message& message, std::chrono::microseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (ready_.empty()) {
    const auto left =
        std::chrono::duration_cast<std::chrono::microseconds>(deadline - std::chrono::steady_clock::now());
    Message raw;
    if (!endpoint_->receive(raw, std::max(left, std::chrono::microseconds(0)))) return false;
    sort_in(raw);
  }
  message = std::move(ready_.front());
  ready_.pop_front();
  header = header_of(message);
  return true;
}

void ReliableEndpoint::forgive_gaps() {
  for (auto& [peer, stream] : incoming_) stream.early_since = std::chrono::steady_clock::now();
}

std::int64_t ReliableEndpoint::stuck_peer(std::chrono::milliseconds timeout) const {
  const auto now = std::chrono::steady_clock::now();
  for (const auto& [peer, stream] : incoming_)
    if (!stream.early.empty() && now - stream.early_since > timeout) return peer;
  return -1;
}

}  // namespace torchrelay::parameters
