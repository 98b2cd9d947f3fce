#include "torchrelay/parameters/channel.h"

#include <algorithm>

namespace torchrelay::parameters {
namespace {

constexpr std::size_t kOutboxBytes = std::size_t{256} << 10;  // sent on when it has grown to this
constexpr int kMessagesPerTurn = 64;                          // handled before what they caused is sent
constexpr std::uint64_t kEvictionRounds =
    16;  // in which all entries are looked at, where there is little room
constexpr auto kLook = std::chrono::milliseconds(500);  // between two looks for dead workers
constexpr auto kIdle = std::chrono::milliseconds(5);    // the longest sleep

std::uint32_t node_count(const Store& store) { return store.header().num_nodes; }

std::uint64_t nanoseconds(std::chrono::steady_clock::duration time) {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
}

}  // namespace

Channel::Channel(std::shared_ptr<Store> store, std::uint32_t channel_id, Network& network,
                 const ChannelOptions& options)
    : store_(std::move(store)),
      channel_id_(channel_id),
      node_(store_->header().node),
      options_(options),
      endpoint_(network.open("node" + std::to_string(node_)), channel_endpoint(node_, channel_id), 1),
      changed_(store_->changed(channel_id)),
      controls_(store_->header().channel_entries),
      outboxes_(node_count(*store_)),
      last_heard_(node_count(*store_), Clock::now()),
      gone_(node_count(*store_), false),
      refused_(node_count(*store_), false) {
  store_->take_user(channel_id_);
}

void Channel::connect(const ChannelAddresses& addresses) {
  const std::uint32_t channels = store_->header().num_channels;
  for (std::uint32_t node = 0; node < outboxes_.size(); ++node)
    endpoint_.connect(channel_endpoint(node, channel_id_), addresses[node * channels + channel_id_]);
}

void Channel::run() noexcept {
  try {
    loop();
  } catch (const Error& error) {
    store_->fail(error.code() == Code::kProtocol ? error.code() : Code::kUnavailable, error.what());
  } catch (const std::exception& error) {
    store_->fail(Code::kUnavailable, error.what());
  }
  try {
    goodbye();
  } catch (
      const std::exception&) {  // what made it fail may keep it from speaking: the others see its silence
  }
  store_->leave_user(channel_id_);
}

void Channel::loop() {
  const auto now = Clock::now();
  round_interval_ = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(1.0 / options_.max_rounds_per_s));
  next_round_ = last_round_ = next_beat_ = next_look_ = last_refresh_all_ = now;
  std::ranges::fill(last_heard_, now);
  while (!store_->is_stopping()) {
    Header header;
    Message message;
    const auto until_round =
        std::clamp<Clock::duration>(next_round_ - Clock::now(), Clock::duration(0), kIdle);
    auto timeout = std::chrono::duration_cast<std::chrono::microseconds>(until_round);
    for (int i = 0; i < kMessagesPerTurn && endpoint_.receive(header, message, timeout); ++i) {
      timeout = std::chrono::microseconds(0);
      try {
        handle(header, message);
      } catch (const Error& error) {
        if (error.code() != Code::kProtocol && error.code() != Code::kArgument) throw;
        store_->count(channel_id_, kProtocolErrors, 1);
      }
    }
    if (Clock::now() >= next_round_) round();
    serve_flush_updates();
    serve_flush_refreshes();
    if (!unmet_.empty()) answer_met_workers();
    send_outboxes();
    if (Clock::now() >= next_beat_) beat();
    report_loss();
  }
}

void Channel::handle(const Header& header, const Message& message) {
  const std::uint32_t sender = node_of(header.sender);
  if (sender >= outboxes_.size())
    throw Error(Code::kProtocol, "parameters: a message from a node that is not there");
  // A node's workers may outlive the threads that serve it, so they do not count as a sign of its life.
  if ((header.sender & kWorkerBit) == 0) {
    last_heard_[sender] = Clock::now();
    if (channel_id_ == 0) store_->header().heard[sender].store(1, std::memory_order_relaxed);
  }
  switch (header.kind) {
    case Kind::kRequest: return handle_request(header, message);
    case Kind::kBundle: return handle_bundle(header, message);
    case Kind::kRelay: return handle_relay(header, message);
    case Kind::kIntent: return take_intent(header, message);
    case Kind::kFence:
    case Kind::kFenceAck:
    case Kind::kFlush:
    case Kind::kFlushAck: return handle_flush(header, message);
    case Kind::kLoss: return take_loss(message);
    case Kind::kGoodbye: return take_goodbye(sender);
    case Kind::kHeartbeat: return;
    default: throw Error(Code::kProtocol, "parameters: a message of an unknown kind");
  }
}

void Channel::take_intent(const Header& header, const Message& message) {
  if (node_of(header.sender) != node_ || index_of(header.sender) >= kMaxWorkers)
    throw Error(Code::kProtocol, "parameters: an intent from another node");
  Reader reader(message.data() + sizeof(Header), message.size_bytes() - sizeof(Header));
  const auto head = reader.take<IntentHead>();
  const auto* keys = reader.take_array<std::int64_t>(header.count);
  store_->value_bytes(Op::kPull, keys, header.count);
  Announcer& announcer = announcers_[kMaxChannels + index_of(header.sender)];
  if (announcer.incarnation != header.incarnation) {
    step_intents(announcer.intents, kFinished);  // those of a dead predecessor
    announcer = {header.incarnation, {}};
  }
  announcer.intents.announce(head.start, head.end, {keys, keys + header.count});
  next_round_ = std::min(next_round_, last_round_ + round_interval_);
}

void Channel::handle_bundle(const Header& header, const Message& message) {
  Reader reader(message.data() + sizeof(Header), message.size_bytes() - sizeof(Header));
  for (std::uint32_t i = 0; i < header.count; ++i) {
    const auto record = reader.take<Record>();
    const std::byte* payload = reader.take_bytes(record.payload_bytes);
    try {
      handle_record(record, payload);
    } catch (const Error& error) {  // the other records are not to blame
      if (error.code() != Code::kProtocol) throw;
      store_->count(channel_id_, kProtocolErrors, 1);
    }
  }
}

void Channel::handle_record(const Record& record, const std::byte* payload) {
  const auto protocol_error = [] {
    throw Error(Code::kProtocol, "parameters: a record that makes no sense");
  };
  if (!store_->valid(record.key) || store_->channel_of(record.key) != channel_id_ ||
      record.node >= outboxes_.size())
    protocol_error();
  const std::size_t value = store_->value_bytes(Op::kPull, record.key);
  const std::size_t row = store_->value_bytes(Op::kPullRow, record.key);
  switch (record.kind) {
    case RecordKind::kGrant:
    case RecordKind::kTransfer:
    case RecordKind::kRefresh:
      if (record.payload_bytes != row) protocol_error();
      if (record.kind == RecordKind::kGrant) return take_grant(record, payload);
      if (record.kind == RecordKind::kTransfer) return take_transfer(record, payload);
      return take_refresh(record, payload);
    case RecordKind::kAck: return take_ack(record);
    case RecordKind::kLocation: return take_location(record);
    case RecordKind::kRecall: return take_recall(record);
    case RecordKind::kAcquire:
      if (record.payload_bytes != 0) protocol_error();
      return take_acquire(record);
    case RecordKind::kUpdate:
      if (record.payload_bytes != 0 && record.payload_bytes != value) protocol_error();
      return take_from_replica(record, payload);
    case RecordKind::kOverwrite:
      if (record.payload_bytes != ((record.flags & kWholeRow) != 0 ? row : value)) protocol_error();
      return take_from_replica(record, payload);
    default: protocol_error();
  }
}

void Channel::take_location(const Record& record) {
  if (store_->home_of(record.key) != node_)
    throw Error(Code::kProtocol, "parameters: where a key is was told to a node that is not its home");
  if ((record.flags & kEvicted) != 0) return take_eviction(record);
  const std::int64_t entry_index = store_->find(record.key);
  if (entry_index < 0) return;  // overtaken by the news that the key was evicted
  Entry& entry = store_->entry(entry_index);
  const LockGuard guard = store_->guard(entry, channel_id_);
  auto& epoch = store_->ownership_epoch(entry_index);
  if (record.epoch <= epoch.load(std::memory_order_relaxed)) return;
  entry.owner = record.node;
  epoch.store(record.epoch, std::memory_order_release);
}

// The key is this node's again. If it gave a replica up to an owner before the one that evicted the key, that
// owner's acknowledgement may still be on its way: the key begins anew after it.
void Channel::take_eviction(const Record& record) {
  const std::int64_t entry_index = store_->find(record.key);
  if (entry_index < 0) return;
  Entry& entry = store_->entry(entry_index);
  {
    const LockGuard guard = store_->guard(entry, channel_id_);
    auto& epoch = store_->ownership_epoch(entry_index);
    if (entry.state == State::kOwned || record.epoch <= epoch.load(std::memory_order_relaxed)) return;
    entry.owner = static_cast<std::uint16_t>(node_);
    epoch.store(record.epoch, std::memory_order_release);
    if (entry.state == State::kReplica) return;
    begin_anew(entry_index);
  }
  unpark(record.key);
}

// An evicted key of this home: at once where somebody waits for it, else when it is next asked for. Under the
// entry's lock.
void Channel::begin_anew(std::int64_t entry_index) {
  Entry& entry = store_->entry(entry_index);
  const std::int64_t key = store_->key_of(entry_index);
  if (!entry.has(kPinned) && !parked_.contains(key))
    return store_->forget(channel_id_, entry_index,
                          store_->ownership_epoch(entry_index).load(std::memory_order_relaxed));
  take_slot(entry_index);
  store_->initialize_row(entry_index, key);
  entry.version = 0;
  entry.state = State::kOwned;
}

// Of a dynamic table: gives up rows that came here and are no longer used, and asks for the same elsewhere.
void Channel::make_room() {
  const bool keys_tight = store_->keys_tight(channel_id_);
  making_room_ = keys_tight || store_->rows_tight(channel_id_);
  std::vector<std::int64_t> waiting;
  waiting.swap(without_room_);
  for (const std::int64_t key : waiting)
    if (store_->find_or_try_make(channel_id_, key) >= 0)
      unpark(key);
    else
      without_room_.push_back(key);
  if (!making_room_) return;
  const std::uint64_t places = store_->header().num_entries / kEvictionRounds;
  evict_moved(places);
  if (!keys_tight) return;
  for (const Moved& moved : store_->moved_away(channel_id_, recall_cursor_, places))
    put(moved.node, {RecordKind::kRecall, 0, static_cast<std::uint16_t>(node_), moved.epoch, moved.key, 0, 0},
        nullptr, 0);
}

void Channel::evict_moved(std::uint64_t places) {
  for (const Moved& evicted : store_->evict_moved(channel_id_, channel_id_, eviction_cursor_, places))
    tell_evicted(evicted.key, evicted.epoch);
}

void Channel::tell_evicted(std::int64_t key, std::uint32_t epoch) {
  const std::uint32_t home = store_->home_of(key);
  put(home, {RecordKind::kLocation, kEvicted, static_cast<std::uint16_t>(home), epoch + 1, key, 0, 0},
      nullptr, 0);
}

// Used since the last recall, it stays for once.
void Channel::take_recall(const Record& record) {
  const std::int64_t entry_index = store_->find(record.key);
  if (entry_index < 0 || store_->home_of(record.key) == node_) return;
  Entry& entry = store_->entry(entry_index);
  const LockGuard guard = store_->guard(entry, channel_id_);
  if (store_->key_of(entry_index) != record.key || entry.state != State::kOwned) return;
  const bool stays = entry.has(kShared | kUsed | kPinned);
  entry.lower(kUsed);
  if (stays) return;
  tell_evicted(record.key, store_->ownership_epoch(entry_index).load(std::memory_order_relaxed));
  store_->forget(channel_id_, entry_index, 0);
  store_->count(channel_id_, kEvictions, 1);
}

// Under the entry's lock.
void Channel::take_slot(std::int64_t entry_index) {
  try {
    return store_->take_slot(channel_id_, entry_index);
  } catch (const Error&) {
    if (!store_->dynamic()) throw;
  }
  for (int pass = 0; pass < 2; ++pass)
    evict_moved(store_->header().num_entries);  // the first spares the used
  store_->take_slot(channel_id_, entry_index);
}

void Channel::round() {
  last_round_ = Clock::now();
  ++rounds_;
  round_intents();
  if (store_->dynamic()) make_room();
  sync_changed();
  std::vector<std::int64_t> again;
  again.swap(reconsider_);
  for (const std::int64_t entry_index : again) {
    const LockGuard guard = store_->guard(store_->entry(entry_index), channel_id_);
    if (store_->entry(entry_index).state == State::kOwned) consider_upgrade(entry_index);
  }
  const bool busy =
      waiting_intents_ || making_room_ || !replicas_.empty() || !shared_.empty() || !reconsider_.empty();
  next_round_ = last_round_ + (busy ? round_interval_ : std::max<Clock::duration>(round_interval_, kIdle));
  in_rounds_ += Clock::now() - last_round_;
  publish_stats();
}

// Only what has changed: replicas and shared keys that nobody uses cost nothing.
void Channel::sync_changed() {
  changed_.take_all([this](std::uint64_t index) {
    const std::int64_t entry_index = store_->entry_in_channel(channel_id_, index);
    Entry& entry = store_->entry(entry_index);
    const LockGuard guard = store_->guard(entry, channel_id_);
    // A dynamic table may have given the place to a key of another channel since it was marked.
    const std::int64_t key = store_->key_of(entry_index);
    if (!store_->valid(key) || store_->channel_of(key) != channel_id_) return;
    if (entry.state == State::kReplica) sync_replica(entry_index, false);
    if (entry.state == State::kOwned) refresh_replicas(entry_index);
  });
  last_refresh_all_ = Clock::now();
}

void Channel::mark_changed(std::int64_t entry_index) { changed_.mark(store_->index_in_channel(entry_index)); }

void Channel::round_intents() {
  const auto now = Clock::now();
  const bool look = now >= next_look_;
  if (look) next_look_ = now + kLook;
  waiting_intents_ = false;
  for (auto& [user_id, announcer] : announcers_) {
    const User& worker = store_->users()[user_id];
    const bool dead = worker.incarnation.load() != announcer.incarnation ||
                      (look && !announcer.intents.empty() && worker.pid.load() != 0 && !is_alive(worker));
    step_intents(announcer.intents, dead ? kFinished : worker.clock.load(std::memory_order_acquire));
    waiting_intents_ |= !announcer.intents.empty();
  }
}

void Channel::step_intents(WorkerIntents& intents, std::int64_t clock) {
  intents.round(
      clock, [this](std::int64_t key) { return begin_intent(key); },
      [this](std::int64_t key) { end_intent(key); });
}

void Channel::beat() {
  const auto now = Clock::now();
  // A process that was stopped has heard nobody: it listens again before it takes others for lost.
  const bool was_stopped = now - next_beat_ > options_.heartbeat_timeout / 2;
  if (was_stopped) {
    std::ranges::fill(last_heard_, now);
    endpoint_.forgive_gaps();
  }
  next_beat_ = now + options_.heartbeat_interval;
  // A node of which a channel failed falls silent, so that the others hear of it.
  if (channel_id_ != 0 || store_->header().failed.load() != 0) return;
  for (std::uint32_t node = 0; node < outboxes_.size(); ++node) {
    if (node == node_ || gone_[node]) continue;
    endpoint_.send(channel_endpoint(node, 0), Kind::kHeartbeat, 0, Writer(0).finish());
    look_for_dead(node);
  }
  const std::int64_t stuck = endpoint_.stuck_peer(options_.heartbeat_timeout);
  if (stuck >= 0) lose(node_of(static_cast<std::uint32_t>(stuck)));
}

// Where connections are refused there is no such process any more. What it said last may still be unread.
void Channel::look_for_dead(std::uint32_t node) {
  const bool was_refused = refused_[node];
  refused_[node] = endpoint_.is_refused(channel_endpoint(node, 0));
  const bool is_silent = Clock::now() - last_heard_[node] > options_.heartbeat_timeout;
  if (is_silent || (was_refused && refused_[node])) lose(node);
}

void Channel::lose(std::uint32_t node) {
  store_->lose({Loss::kUnreachable, static_cast<std::uint16_t>(node), 0});
}

// At once, so that all name the first loss, not the nodes that leave because of it; once.
void Channel::report_loss() {
  const Loss loss = store_->loss();
  if (has_reported_loss_ || loss.how == Loss::kNone) return;
  has_reported_loss_ = true;
  for (std::uint32_t node = 0; node < outboxes_.size(); ++node) {
    if (node == node_) continue;
    Writer writer(sizeof loss);
    writer.put(loss);
    endpoint_.send(channel_endpoint(node, channel_id_), Kind::kLoss, 0, writer.finish());
  }
}

void Channel::take_loss(const Message& message) {
  const auto loss =
      Reader(message.data() + sizeof(Header), message.size_bytes() - sizeof(Header)).take<Loss>();
  if (loss.how == Loss::kNone || loss.how > Loss::kFailed || loss.node >= outboxes_.size())
    throw Error(Code::kProtocol, "parameters: a loss that makes no sense");
  store_->lose(loss);
}

void Channel::goodbye() {
  send_outboxes();
  report_loss();
  for (std::uint32_t node = 0; node < outboxes_.size(); ++node)
    if (node != node_)
      endpoint_.send(channel_endpoint(node, channel_id_), Kind::kGoodbye, 0, Writer(0).finish());
}

// All leave together, after a barrier: whoever still needs a node that has left names it.
void Channel::take_goodbye(std::uint32_t sender) {
  gone_[sender] = true;
  std::uint32_t nobody = 0;
  store_->header().departed_node.compare_exchange_strong(nobody, sender + 1);
}

void Channel::put(std::uint32_t node, Record record, const void* payload, std::size_t payload_bytes) {
  Outbox& outbox = outboxes_[node];
  record.payload_bytes = static_cast<std::uint32_t>(payload_bytes);
  const std::size_t at = outbox.bytes.size();
  outbox.bytes.resize(at + sizeof record + payload_bytes);
  std::memcpy(outbox.bytes.data() + at, &record, sizeof record);
  if (payload_bytes != 0) std::memcpy(outbox.bytes.data() + at + sizeof record, payload, payload_bytes);
  ++outbox.count;
  if (outbox.bytes.size() >= kOutboxBytes) send_outbox(node);
}

void Channel::send_outbox(std::uint32_t node) {
  Outbox& outbox = outboxes_[node];
  if (outbox.count == 0) return;
  Writer writer(outbox.bytes.size());
  writer.put_bytes(outbox.bytes.data(), outbox.bytes.size());
  endpoint_.send(channel_endpoint(node, channel_id_), Kind::kBundle, outbox.count, writer.finish());
  outbox.bytes.clear();
  outbox.count = 0;
}

void Channel::send_outboxes() {
  for (std::uint32_t node = 0; node < outboxes_.size(); ++node) send_outbox(node);
}

void Channel::publish_stats() {
  auto& cells = store_->header().stats[channel_id_];
  cells[kSentBytes].store(endpoint_.sent_bytes, std::memory_order_relaxed);
  cells[kReceivedBytes].store(endpoint_.received_bytes, std::memory_order_relaxed);
  cells[kSentMessages].store(endpoint_.sent_messages, std::memory_order_relaxed);
  cells[kReceivedMessages].store(endpoint_.received_messages, std::memory_order_relaxed);
  store_->count(channel_id_, kProtocolErrors, endpoint_.protocol_errors - reported_errors_);
  reported_errors_ = endpoint_.protocol_errors;
  cells[kDuplicates].store(endpoint_.duplicates, std::memory_order_relaxed);
  ChannelBoard& board = store_->header().boards[channel_id_];
  board.rounds.store(rounds_, std::memory_order_relaxed);
  board.replicas.store(replicas_.size(), std::memory_order_relaxed);
  board.round_ns.store(nanoseconds(in_rounds_), std::memory_order_relaxed);
  board.refresh_age_ns.store(nanoseconds(refresh_age_), std::memory_order_relaxed);
}

}  // namespace torchrelay::parameters
