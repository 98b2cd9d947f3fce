// Requests of workers: served where the key is, forwarded where it is elsewhere, parked where it is on its
// way.
#include <algorithm>

#include "torchrelay/parameters/channel.h"

namespace torchrelay::parameters {
namespace {

constexpr std::uint32_t kMaxKeys = 1u << 28;  // of a request: more is nonsense
constexpr std::uint32_t kLocationAhead = 16;  // epochs are fetched this many keys before they are read

// Of the worker that asked.
std::uint32_t incarnation_of(const Message& reply) {
  Reader reader(reply.data() + sizeof(Header), reply.size_bytes() - sizeof(Header));
  return parameters::incarnation_of(reader.take<ReplyHead>().request_id);
}

}  // namespace

void Channel::handle_request(const Header& header, const Message& message) {
  Reader reader(message.data() + sizeof(Header), message.size_bytes() - sizeof(Header));
  const auto head = reader.take<RequestHead>();
  const std::size_t count = header.count;
  if (head.op > static_cast<std::uint32_t>(Op::kSetRow) || count == 0 || count > kMaxKeys ||
      node_of(head.requester) >= outboxes_.size() || (head.requester & kWorkerBit) == 0)
    throw Error(Code::kProtocol, "parameters: a request that makes no sense");
  const Op op = static_cast<Op>(head.op);
  const auto* keys = reader.take_array<std::int64_t>(count);
  const auto* epochs = reinterpret_cast<const std::uint32_t*>(reader.take_bytes(padded(count * 4)));
  const auto* positions = reinterpret_cast<const std::uint32_t*>(reader.take_bytes(padded(count * 4)));
  const std::size_t value_bytes = store_->value_bytes(op, keys, count);
  for (std::size_t i = 0; i < count; ++i)
    if (store_->channel_of(keys[i]) != channel_id_)
      throw Error(Code::kProtocol, "parameters: a request of another channel");
  Writer writer(sizeof(ReplyHead) + 2 * padded(count * 4) + (reads(op) ? value_bytes : 0));
  auto* reply = reinterpret_cast<ReplyHead*>(writer.skip(sizeof(ReplyHead)));
  auto* reply_positions = reinterpret_cast<std::uint32_t*>(writer.skip(padded(count * 4)));
  auto* reply_epochs = reinterpret_cast<std::uint32_t*>(writer.skip(padded(count * 4)));
  const std::byte* request_values = reads(op) ? nullptr : reader.take_bytes(value_bytes);
  std::byte* values = reads(op) ? writer.position() : const_cast<std::byte*>(request_values);
  std::vector<Missed> missed;
  std::vector<std::uint32_t> shared_keys;
  store_->access_owned(op, channel_id_, keys, count, values, missed, shared_keys);

  // Close the gaps that missed keys left in the answer; group them by where they go.
  std::vector<std::vector<Asked>> by_node(outboxes_.size());
  std::uint32_t served = 0;
  std::size_t next_missed = 0;
  const std::byte* from = values;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (i + kLocationAhead < count) store_->prefetch_location(keys[i + kLocationAhead]);
    const bool is_missed = next_missed < missed.size() && missed[next_missed].index == i;
    const std::size_t size = is_missed || reads(op) ? store_->value_bytes(op, keys[i]) : 0;
    if (!is_missed) {
      const std::int64_t entry_index = store_->dynamic() ? store_->find(keys[i]) : keys[i];
      reply_positions[served] = positions[i];
      reply_epochs[served++] =
          entry_index < 0 ? 0 : store_->ownership_epoch(entry_index).load(std::memory_order_relaxed);
      if (reads(op)) {
        std::byte* to = writer.skip(size);
        if (to != from) std::memmove(to, from, size);
      }
    } else {
      ++next_missed;
      const std::byte* value = nullptr;
      if (!reads(op)) {
        value = request_values;
        if (store_->header().num_classes == 1)
          value += i * size;
        else
          for (std::uint32_t j = 0; j < i; ++j) value += store_->value_bytes(op, keys[j]);
      }
      place_missed(head, {head, keys[i], epochs[i], positions[i], value}, message, by_node);
    }
    if (reads(op)) from += size;
  }
  *reply = {head.request_id, node_, head.op, served, 0};
  if (served != 0)
    send_reply(head.requester, static_cast<std::uint32_t>(count), writer.finish(),
               catch_up(node_of(head.requester), keys, shared_keys));
  forward_requests(head, by_node);
}

// Brings the replicas that `node` holds of these keys up to date; true if it holds any.
bool Channel::catch_up(std::uint32_t node, const std::int64_t* keys,
                       const std::vector<std::uint32_t>& indices) {
  bool any = false;
  for (const std::uint32_t i : indices) {
    const std::int64_t entry_index = store_->find(keys[i]);
    if (entry_index < 0) continue;
    Replica* replica = replica_of(entry_index, node);
    if (replica == nullptr) continue;
    any = true;
    const LockGuard guard = store_->guard(store_->entry(entry_index), channel_id_);
    raise_version(entry_index);
    if (replica->version != store_->entry(entry_index).version) refresh(entry_index, *replica, 0);
  }
  return any;
}

void Channel::place_missed(const RequestHead& head, Asked asked, const Message& message,
                           std::vector<std::vector<Asked>>& by_node) {
  const OwnerLookup known = look_up_owner(asked.key);
  if (known.entry_index >= 0) {
    const Op op = static_cast<Op>(head.op);
    const bool is_set = op == Op::kSet || op == Op::kSetRow;
    const Entry& entry = store_->entry(known.entry_index);
    if (is_set && entry.state == State::kReplica && node_of(head.requester) == node_)
      return entry.has(kLeaving) ? park({message, asked, {}}) : overwrite_replica(known.entry_index, asked);
  }
  if (must_wait(known, asked.key, asked.epoch)) return park({message, asked, {}});
  asked.epoch = known.epoch;
  store_->count(channel_id_, kForwards, 1);
  by_node[known.owner].push_back(asked);
}

// The entry may be locked. In a dynamic table a worker may evict what is only a location, meanwhile.
Channel::OwnerLookup Channel::look_up_owner(std::int64_t key) const {
  const std::int64_t entry_index = store_->find(key);
  if (entry_index >= 0) {
    // In this order: a worker may be learning a newer pair. An owner older than its epoch would be asked to
    // wait for a key that never comes.
    const std::uint32_t epoch = store_->ownership_epoch(entry_index).load(std::memory_order_acquire);
    const OwnerLookup known{entry_index, store_->entry(entry_index).owner, epoch};
    if (store_->key_of(entry_index) == key) return known;
  }
  return {-1, store_->home_of(key), 0};
}

// Keys come only to their home and to where there is an entry that waits for them; if there is none, the
// knowledge was older than what this node has forgotten, and the home knows more.
bool Channel::must_wait(const OwnerLookup& known, std::int64_t key, std::uint32_t epoch) const {
  if (known.entry_index < 0 && store_->home_of(key) != node_) return false;
  return epoch > known.epoch || known.owner == node_;
}

// A worker of this node sets a key that is a replica here: written here, and sent to the owner in order with
// this node's updates. What was pushed before it and not sent is overwritten anyway.
void Channel::overwrite_replica(std::int64_t entry_index, const Asked& asked) {
  const Op op = static_cast<Op>(asked.head.op);
  const std::size_t size = store_->value_bytes(op, asked.key);
  Entry& entry = store_->entry(entry_index);
  const LockGuard guard = store_->guard(entry, channel_id_);
  Control& mine = control(entry_index);
  std::memcpy(store_->row(entry_index), asked.value, size);
  std::memset(store_->accumulator(entry_index), 0, store_->class_of(entry_index).stride_bytes);
  entry.lower(kDirty);
  in_flight_.erase(entry_index);
  mine.overwritten = true;
  ++mine.outstanding;
  put(entry.owner,
      {RecordKind::kOverwrite, static_cast<std::uint8_t>(op == Op::kSetRow ? kWholeRow : 0),
       static_cast<std::uint16_t>(node_),
       store_->ownership_epoch(entry_index).load(std::memory_order_relaxed), asked.key, entry.version, 0},
      asked.value, size);
  overwrites_[entry_index].push_back(asked);
}

// Once the owner has all overwrites of the key, whoever made them is told.
void Channel::answer_overwrites(std::int64_t entry_index) {
  const auto found = overwrites_.find(entry_index);
  if (found == overwrites_.end() || control(entry_index).outstanding != 0) return;
  for (const Asked& asked : found->second) send_reply(asked.head.requester, 1, reply_of(asked), false);
  overwrites_.erase(found);
}

Message Channel::reply_of(const Asked& asked) {
  Writer writer(sizeof(ReplyHead) + 2 * padded(4));
  writer.put(ReplyHead{asked.head.request_id, node_, asked.head.op, 1, 0});
  std::memcpy(writer.skip(padded(4)), &asked.position, 4);
  std::memset(writer.skip(padded(4)), 0, padded(4));  // says nothing new of where the key is
  return writer.finish();
}

Message Channel::request_of(const RequestHead& head, const Asked* asked, std::size_t count) {
  const Op op = static_cast<Op>(head.op);
  std::size_t value_bytes = 0;
  for (std::size_t i = 0; i < count && !reads(op); ++i) value_bytes += store_->value_bytes(op, asked[i].key);
  Writer writer(sizeof(RequestHead) + count * 8 + 2 * padded(count * 4) + value_bytes);
  writer.put(head);
  auto* keys = writer.array<std::int64_t>(count);
  auto* epochs = reinterpret_cast<std::uint32_t*>(writer.skip(padded(count * 4)));
  auto* positions = reinterpret_cast<std::uint32_t*>(writer.skip(padded(count * 4)));
  for (std::size_t i = 0; i < count; ++i) {
    keys[i] = asked[i].key;
    epochs[i] = asked[i].epoch;
    positions[i] = asked[i].position;
    if (!reads(op)) writer.put_bytes(asked[i].value, store_->value_bytes(op, asked[i].key));
  }
  return writer.finish();
}

void Channel::forward_requests(const RequestHead& head, const std::vector<std::vector<Asked>>& by_node) {
  for (std::uint32_t node = 0; node < by_node.size(); ++node) {
    if (by_node[node].empty()) continue;
    send_outbox(node);  // a key that was just sent there must come first
    endpoint_.send(channel_endpoint(node, channel_id_), Kind::kRequest,
                   static_cast<std::uint32_t>(by_node[node].size()),
                   request_of(head, by_node[node].data(), by_node[node].size()));
  }
}

// A worker we have not met, or whose node must hear something first, is answered through its own channel. We
// may have met its predecessor: what is sent to that one's address is lost.
void Channel::send_reply(std::uint32_t requester, std::uint32_t count, Message reply, bool through_channel) {
  if (!through_channel && endpoint_.has_met(requester, incarnation_of(reply)))
    return endpoint_.send(requester, Kind::kReply, count, std::move(reply));
  const std::uint32_t node = node_of(requester);
  if (node == node_) return answer_worker(requester, count, std::move(reply));
  send_outbox(node);
  const std::size_t body = reply.size_bytes() - sizeof(Header);
  Writer writer(8 + body);
  writer.put(requester);
  writer.put(std::uint32_t{0});
  writer.put_bytes(reply.data() + sizeof(Header), body);
  endpoint_.send(channel_endpoint(node, channel_id_), Kind::kRelay, count, writer.finish());
}

void Channel::handle_relay(const Header& header, const Message& message) {
  Reader reader(message.data() + sizeof(Header), message.size_bytes() - sizeof(Header));
  const auto requester = reader.take<std::uint32_t>();
  reader.take<std::uint32_t>();
  if (node_of(requester) != node_ || index_of(requester) >= kMaxWorkers)
    throw Error(Code::kProtocol, "parameters: an answer to a worker that is not of this node");
  Writer writer(reader.remaining());
  writer.put_bytes(reader.position(), reader.remaining());
  answer_worker(requester, header.count, writer.finish());
}

// To a worker of this node. What it asked another node may be answered before its introduction, which it sent
// here first, has been read.
void Channel::answer_worker(std::uint32_t worker, std::uint32_t count, Message reply) {
  if (endpoint_.has_met(worker, incarnation_of(reply)))
    return endpoint_.send(worker, Kind::kReply, count, std::move(reply));
  unmet_[worker].push_back({count, std::move(reply)});
}

void Channel::answer_met_workers() {
  for (auto& [endpoint, replies] : unmet_)
    std::erase_if(replies, [this, worker = endpoint](Reply& reply) {
      const User& user = store_->users()[kMaxChannels + index_of(worker)];
      const std::uint32_t incarnation = incarnation_of(reply.message);
      if (user.pid.load() == 0 || user.incarnation.load() != incarnation) return true;  // it has left
      if (!endpoint_.has_met(worker, incarnation)) return false;
      endpoint_.send(worker, Kind::kReply, reply.count, std::move(reply.message));
      return true;
    });
  std::erase_if(unmet_, [](const auto& waiting) { return waiting.second.empty(); });
}

// Sends an acquire on to the owner, or keeps it until the key arrives. The entry may be locked.
void Channel::route(Record record) {
  const OwnerLookup known = look_up_owner(record.key);
  if (must_wait(known, record.key, record.epoch)) return park({Message(), {}, record});
  record.epoch = known.epoch;
  put(known.owner, record, nullptr, 0);
}

void Channel::park(Parked parked) {
  const std::int64_t key = parked.record.kind == RecordKind{} ? parked.asked.key : parked.record.key;
  if (store_->dynamic() && store_->home_of(key) == node_ && store_->find(key) < 0 && !parked_.contains(key))
    without_room_.push_back(key);
  parked_[key].push_back(std::move(parked));
  store_->count(channel_id_, kParked, 1);
}

// The key has arrived: what waited for it is done in the order it came.
void Channel::unpark(std::int64_t key) {
  const auto found = parked_.find(key);
  if (found == parked_.end()) return;
  const std::vector<Parked> waiting = std::move(found->second);
  parked_.erase(found);
  for (const Parked& parked : waiting) {
    if (parked.record.kind != RecordKind{}) {
      take_acquire(parked.record);
      continue;
    }
    Message request = request_of(parked.asked.head, &parked.asked, 1);
    const Header header{0, 0, 0, 0, Kind::kRequest, 0, 1};
    handle_request(header, request);
  }
}

}  // namespace torchrelay::parameters
