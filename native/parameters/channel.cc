#include "parameters/channel.h"

#include <algorithm>

#include "core/error.h"

namespace torchrelay::parameters {
namespace {

constexpr int kMessagesPerTurn = 64;                  // handled before what they caused is sent
constexpr auto kIdle = std::chrono::milliseconds(5);  // the longest sleep

std::uint64_t nanoseconds(std::chrono::steady_clock::duration time) {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
}

[[noreturn]] void throw_senseless() { throw Error(Code::kProtocol, "parameters: a malformed record"); }

}  // namespace

Channel::Channel(std::shared_ptr<Store> store, std::uint32_t channel_id, Network& network,
                 const ChannelOptions& options)
    : state_(std::move(store), channel_id, network, options),
      replies_(state_),
      router_(state_, owner_, replicas_, evictor_, replies_),
      evictor_(state_, router_),
      owner_(state_, router_),
      replicas_(state_, owner_, router_, evictor_, replies_),
      intents_(state_, replicas_),
      fence_(state_, owner_, replicas_),
      peers_(state_),
      round_interval_(std::chrono::duration_cast<Clock::duration>(
          std::chrono::duration<double>(1.0 / options.max_rounds_per_s))) {
  state_.store->membership().join(channel_id);
}

void Channel::connect(const ChannelAddresses& addresses) {
  const std::uint32_t channels = state_.store->header().num_channels;
  for (std::uint32_t node = 0; node < state_.num_nodes(); ++node)
    state_.endpoint.connect(channel_endpoint(node, state_.channel_id),
                            addresses[node * channels + state_.channel_id]);
}

void Channel::run() noexcept {
  Store& store = *state_.store;
  try {
    loop();
  } catch (const Error& error) {
    store.membership().fail(error.code() == Code::kProtocol ? error.code() : Code::kUnavailable,
                            error.what());
  } catch (const std::exception& error) {
    store.membership().fail(Code::kUnavailable, error.what());
  }
  try {
    peers_.announce_departure();
  } catch (const std::exception&) {
    // The failure may keep this node from sending; the others then notice that it is silent.
  }
  store.membership().leave(state_.channel_id);
}

void Channel::loop() {
  next_round_ = last_round_ = Clock::now();
  owner_.end_refreshes();
  peers_.start();
  while (!state_.store->membership().is_stopping()) {
    receive();
    if (Clock::now() >= next_round_) round();
    fence_.serve();
    replies_.send_waiting();
    owner_.send_acks();
    state_.outbox.flush_all();
    peers_.beat();
    peers_.report_loss();
  }
}

void Channel::receive() {
  Header header;
  Message message;
  const auto until_round = std::clamp<Clock::duration>(next_round_ - Clock::now(), Clock::duration(0), kIdle);
  auto timeout = std::chrono::duration_cast<std::chrono::microseconds>(until_round);
  for (int i = 0; i < kMessagesPerTurn && state_.endpoint.receive(header, message, timeout); ++i) {
    timeout = std::chrono::microseconds(0);
    try {
      handle(header, message);
    } catch (const Error& error) {
      if (error.code() != Code::kProtocol && error.code() != Code::kArgument) throw;
      state_.count(kProtocolErrors);
    }
  }
}

void Channel::handle(const Header& header, const Message& message) {
  const std::uint32_t sender = node_of(header.sender);
  if (sender >= state_.num_nodes())
    throw Error(Code::kProtocol, "parameters: a message from an unknown node");
  // A node's workers may outlive the threads that serve it, so they do not count as a sign of its life.
  if ((header.sender & kWorkerBit) == 0) peers_.heard_from(sender);
  switch (header.kind) {
    case Kind::kRequest: return router_.handle_request(header, message);
    case Kind::kBundle: return handle_bundle(header, message);
    case Kind::kRelay: return replies_.handle_relay(header, message);
    case Kind::kIntent:
      intents_.handle_intent(header, message);
      next_round_ = std::min(next_round_, last_round_ + round_interval_);
      return;
    case Kind::kFence:
    case Kind::kFenceAck:
    case Kind::kFlush:
    case Kind::kFlushAck: return fence_.handle(header, message);
    case Kind::kLoss: return peers_.handle_loss(message);
    case Kind::kGoodbye: return peers_.handle_goodbye(sender);
    case Kind::kHeartbeat: return;
    default: throw Error(Code::kProtocol, "parameters: a message of an unknown kind");
  }
}

void Channel::handle_bundle(const Header& header, const Message& message) {
  Reader reader(message.data() + sizeof(Header), message.size_bytes() - sizeof(Header));
  for (std::uint32_t i = 0; i < header.count; ++i) {
    const auto record = reader.take<Record>();
    const std::byte* payload = reader.take_bytes(payload_bytes(record));
    try {
      handle_record(record, payload);
    } catch (const Error& error) {  // the other records are not to blame
      if (error.code() != Code::kProtocol) throw;
      state_.count(kProtocolErrors);
    }
  }
}

std::size_t Channel::payload_bytes(const Record& record) const {
  const Store& store = *state_.store;
  if (record.node >= state_.num_nodes()) throw_senseless();
  if (record.kind == RecordKind::kAck) return 0;
  if (!store.header().valid(record.key) || store.header().channel_of(record.key) != state_.channel_id)
    throw_senseless();
  const std::size_t value = store.value_bytes(Op::kPull, record.key);
  const std::size_t row = store.value_bytes(Op::kPullRow, record.key);
  switch (record.kind) {
    case RecordKind::kGrant:
    case RecordKind::kTransfer: return row;
    case RecordKind::kLoan: return value;
    case RecordKind::kUpdate: return (record.flags & kEmpty) != 0 ? 0 : value;
    case RecordKind::kRefresh:
    case RecordKind::kOverwrite: return (record.flags & kWholeRow) != 0 ? row : value;
    default: return 0;
  }
}

void Channel::handle_record(const Record& record, const std::byte* payload) {
  switch (record.kind) {
    case RecordKind::kAcquire: return owner_.handle_acquire(record);
    case RecordKind::kUpdate:
    case RecordKind::kOverwrite: return owner_.handle_replica_write(record, payload);
    case RecordKind::kGrant:
    case RecordKind::kLoan: return replicas_.handle_grant(record, payload);
    case RecordKind::kTransfer: return replicas_.handle_transfer(record, payload);
    case RecordKind::kRefresh: return replicas_.handle_refresh(record, payload);
    case RecordKind::kAck: return replicas_.handle_ack(record);
    case RecordKind::kLocation: return router_.handle_location(record);
    case RecordKind::kRecall: return evictor_.handle_recall(record);
    default: throw_senseless();
  }
}

void Channel::round() {
  last_round_ = Clock::now();
  ++state_.rounds;
  intents_.round();
  if (state_.store->header().dynamic()) evictor_.make_room();
  sync_changed();
  owner_.reconsider_upgrades();
  const bool busy =
      intents_.is_busy() || evictor_.is_making_room() || !replicas_.replicas().empty() || owner_.is_busy();
  next_round_ = last_round_ + (busy ? round_interval_ : std::max<Clock::duration>(round_interval_, kIdle));
  in_rounds_ += Clock::now() - last_round_;
  publish_stats();
}

// Only changed entries: unused replicas and shared keys cost nothing.
void Channel::sync_changed() {
  state_.changed.take_all([this](std::uint64_t index) {
    const Store& store = *state_.store;
    LockedEntry entry = state_.lock(store.header().entry_in_channel(state_.channel_id, index));
    // A dynamic table may have given the place to a key of another channel since it was marked.
    const std::int64_t key = entry.key();
    if (!store.header().valid(key) || store.header().channel_of(key) != state_.channel_id) return;
    if (entry->state == State::kReplica) replicas_.sync(entry, false);
    if (entry->state == State::kOwned) owner_.refresh_replicas(entry, false);
  });
  owner_.end_refreshes();
}

void Channel::publish_stats() {
  const ReliableEndpoint& endpoint = state_.endpoint;
  const auto publish = [&stats = state_.store->header().stats[state_.channel_id]](Stat stat,
                                                                                  std::uint64_t value) {
    stats[stat].store(value, std::memory_order_relaxed);
  };
  publish(kSentBytes, endpoint.sent_bytes);
  publish(kReceivedBytes, endpoint.received_bytes);
  publish(kSentMessages, endpoint.sent_messages);
  publish(kReceivedMessages, endpoint.received_messages);
  publish(kDuplicates, endpoint.duplicates);
  publish(kRounds, state_.rounds);
  publish(kReplicas, replicas_.replicas().size());
  publish(kRoundNs, nanoseconds(in_rounds_));
  publish(kRefreshAgeNs, nanoseconds(owner_.refresh_age()));
  state_.count(kProtocolErrors, endpoint.protocol_errors - reported_errors_);
  reported_errors_ = endpoint.protocol_errors;
}

}  // namespace torchrelay::parameters
