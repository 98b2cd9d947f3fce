#include "parameters/request_router.h"

#include "core/error.h"
#include "parameters/evictor.h"
#include "parameters/owner_side.h"
#include "parameters/replica_side.h"
#include "parameters/reply_sender.h"

namespace torchrelay::parameters {
namespace {

constexpr std::uint32_t kLocationAhead = 16;  // epochs are fetched this many keys before they are read

std::uint32_t known_epoch(const Store& store, std::int64_t key) {
  const std::int64_t entry_index = store.index().find(key);
  return entry_index < 0 ? 0 : store.ownership_epoch(entry_index);
}

}  // namespace

void RequestRouter::handle_request(const Header& header, const Message& message) {
  const Request request = decode_request(*state_.store, state_.channel_id, header, message);
  forward(request.head, serve(request, message));
}

RequestRouter::ByNode RequestRouter::serve(const Request& request, const Message& message) {
  Store& store = *state_.store;
  const std::int64_t* keys = request.keys;
  ReplyWriter reply(request);
  const Values values = reads(request.op) ? Values{.to = reply.values()} : Values{.from = request.values};
  std::vector<Missed> missed;
  std::vector<std::uint32_t> shared_keys;
  store.access_owned(request.op, state_.channel_id, keys, request.count, values, missed, shared_keys);

  ByNode by_node(state_.num_nodes());
  auto next_missed = missed.begin();
  std::size_t offset = 0;  // of the key's value in those of all keys
  for (std::uint32_t i = 0; i < request.count; ++i) {
    if (i + kLocationAhead < request.count) store.prefetch_location(keys[i + kLocationAhead]);
    const std::size_t size = store.value_bytes(request.op, keys[i]);
    if (next_missed == missed.end() || next_missed->index != i) {
      reply.add(i, known_epoch(store, keys[i]), offset, size);
    } else {
      ++next_missed;
      place_missed({.head = request.head,
                    .key = keys[i],
                    .epoch = request.epochs[i],
                    .position = request.positions[i],
                    .value = reads(request.op) ? nullptr : request.values + offset},
                   message, by_node);
    }
    offset += size;
  }
  if (reply.served() != 0) {
    const auto requester_node = static_cast<std::uint16_t>(node_of(request.head.requester));
    const bool holds_replicas = owner_.catch_up(requester_node, keys, shared_keys);
    replies_.send(request.head.requester, request.count, reply.finish(state_.node), holds_replicas);
  }
  return by_node;
}

void RequestRouter::forward(const RequestHead& head, const ByNode& by_node) {
  for (std::uint32_t node = 0; node < by_node.size(); ++node) {
    if (by_node[node].empty()) continue;
    state_.outbox.flush(node);  // a key that was just sent there must come first
    state_.endpoint.send(channel_endpoint(node, state_.channel_id), Kind::kRequest,
                         static_cast<std::uint32_t>(by_node[node].size()),
                         encode_request(*state_.store, head, by_node[node].data(), by_node[node].size()));
  }
}

void RequestRouter::place_missed(KeyRequest request, const Message& message, ByNode& by_node) {
  const OwnerLookup known = look_up_owner(request.key);
  if (known.entry_index >= 0 && node_of(request.head.requester) == state_.node) {
    const Entry& entry = state_.store->entry(known.entry_index);
    if (entry.state == State::kReplica) {
      const bool sets_key = sets(static_cast<Op>(request.head.op));
      const bool lent = entry.has(kLent);
      if (sets_key && !lent && !entry.has(kLeaving)) return replicas_.overwrite(known.entry_index, request);
      if (!sets_key || lent) replicas_.send_ahead(known.entry_index);
      if (sets_key || lent) return park(request.key, ParkedRequest{message, request});
    }
  }
  if (must_wait(known, request.key, request.epoch)) return park(request.key, ParkedRequest{message, request});
  request.epoch = known.epoch;
  state_.count(kForwards);
  by_node[known.owner].push_back(request);
}

// The entry may be locked. In a dynamic table a worker may evict what is only a location, meanwhile.
RequestRouter::OwnerLookup RequestRouter::look_up_owner(std::int64_t key) const {
  const Store& store = *state_.store;
  const std::int64_t entry_index = store.index().find(key);
  if (entry_index >= 0) {
    // In this order: a worker may be learning a newer pair. An owner older than its epoch would be asked to
    // wait for a key that never comes.
    const std::uint32_t epoch = store.ownership_epoch(entry_index, std::memory_order_acquire);
    const OwnerLookup known{
        .entry_index = entry_index, .owner = store.entry(entry_index).owner, .epoch = epoch};
    if (store.key_of(entry_index) == key) return known;
  }
  return {.entry_index = -1, .owner = store.header().home_of(key), .epoch = 0};
}

// Keys come only to their home and to where there is an entry that waits for them; if there is none, the
// knowledge was older than what this node has forgotten, and the home knows more.
bool RequestRouter::must_wait(const OwnerLookup& known, std::int64_t key, std::uint32_t epoch) const {
  if (known.entry_index < 0 && state_.store->header().home_of(key) != state_.node) return false;
  return epoch > known.epoch || known.owner == state_.node;
}

void RequestRouter::route(Record record) {
  const OwnerLookup known = look_up_owner(record.key);
  if (must_wait(known, record.key, record.epoch)) return park(record.key, record);
  record.epoch = known.epoch;
  state_.outbox.put(known.owner, record);
}

void RequestRouter::park(std::int64_t key, Parked parked) {
  const Store& store = *state_.store;
  if (store.header().dynamic() && store.header().home_of(key) == state_.node && store.index().find(key) < 0 &&
      !is_parked(key))
    evictor_.await_room(key);
  parked_[key].push_back(std::move(parked));
  state_.count(kParked);
}

void RequestRouter::unpark(std::int64_t key) {
  const auto found = parked_.find(key);
  if (found == parked_.end()) return;
  const std::vector<Parked> waiting = std::move(found->second);
  parked_.erase(found);
  for (const Parked& parked : waiting) {
    if (const auto* acquire = std::get_if<Record>(&parked)) {
      owner_.handle_acquire(*acquire);
      continue;
    }
    const KeyRequest& request = std::get<ParkedRequest>(parked).request;
    handle_request({.kind = Kind::kRequest, .count = 1},
                   encode_request(*state_.store, request.head, &request, 1));
  }
}

void RequestRouter::handle_location(const Record& record) {
  Store& store = *state_.store;
  if (store.header().home_of(record.key) != state_.node)
    throw Error(Code::kProtocol, "parameters: the location of a key was sent to a node that is not its home");
  if ((record.flags & kEvicted) != 0) return evictor_.handle_eviction(record);
  const std::int64_t entry_index = store.index().find(record.key);
  if (entry_index < 0) return;  // overtaken by the news that the key was evicted
  LockedEntry entry = state_.lock(entry_index);
  if (record.epoch > entry.epoch()) entry.set_owner(record.node, record.epoch);
}

}  // namespace torchrelay::parameters
