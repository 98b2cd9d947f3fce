#include "parameters/worker.h"

#include <unistd.h>

#include <algorithm>
#include <thread>
#include <unordered_set>
#include <utility>

#include "core/error.h"

namespace torchrelay::parameters {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(50);  // between two looks at peers and interrupts
constexpr auto kLook = std::chrono::milliseconds(500);  // between two looks at the leader, while busy
constexpr std::size_t kKeysPerTrial = 64;               // pulled if local before the next are tried
constexpr auto kSyncPoll = std::chrono::microseconds(20);
constexpr auto kReplicaPoll = std::chrono::microseconds(100);

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::string with_seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", seconds);
  return text;
}

}  // namespace

Worker::Worker(std::shared_ptr<Store> store, std::uint32_t worker, std::shared_ptr<Network> network,
               const ChannelAddresses& addresses, const WorkerOptions& options, Interrupt interrupt)
    : store_(std::move(store)),
      user_id_(kMaxChannels + worker),
      options_(options),
      interrupt_(std::move(interrupt)),
      network_(std::move(network)),
      is_leader_(store_->header().leader.pid == getpid()) {
  if (worker >= kMaxWorkers)
    throw Error(Code::kArgument, "parameters: worker_id " + std::to_string(worker) + "; a node has at most " +
                                     std::to_string(kMaxWorkers) + " workers");
  store_->membership().join(user_id_);
  if (network_ == nullptr) return;
  const SlabHeader& header = store_->header();
  const std::string label = "node" + std::to_string(header.node);
  endpoint_ =
      make_process_owned<ReliableEndpoint>(network_->open(label), worker_endpoint(header.node, worker),
                                           store_->users()[user_id_].incarnation.load());
  for (std::size_t i = 0; i < addresses.size(); ++i)
    endpoint_->connect(channel_endpoint(static_cast<std::uint32_t>(i / header.num_channels),
                                        static_cast<std::uint32_t>(i % header.num_channels)),
                       addresses[i]);
  // Answers of owners that have not met this worker come through its node's channels.
  for (std::uint32_t channel = 0; channel < header.num_channels; ++channel)
    endpoint_->greet(channel_endpoint(header.node, channel));
  by_destination_.resize(addresses.size());
  first_wire_id_ = first_request_id(store_->users()[user_id_].incarnation.load());
}

Worker::~Worker() {
  if (!finalized_ && !origin_.is_forked()) store_->membership().leave(user_id_);
}

void Worker::check_size(Op op, const std::int64_t* keys, std::size_t count, std::size_t size_bytes) const {
  const std::size_t expected = store_->value_bytes(op, keys, count);
  const std::size_t element_bytes = torchrelay::size_bytes(store_->header().dtype);
  if (expected != size_bytes)
    throw Error(Code::kArgument,
                "parameters: the values of these " + std::to_string(count) + " keys are " +
                    std::to_string(expected / element_bytes) + " elements, but the buffer holds " +
                    std::to_string(size_bytes / element_bytes) + "; nothing was read or written");
}

std::int64_t Worker::access(Op op, const std::int64_t* keys, std::size_t count, std::byte* values,
                            std::size_t size_bytes, std::shared_ptr<void> holder) {
  check_size(op, keys, count, size_bytes);
  store_->membership().check_peers();
  look_at_leader();
  if (pending_.size() >= options_.max_unfinished)
    wait_until([this] { return pending_.size() < options_.max_unfinished; },
               "one of the unfinished operations, of which there are as many as max_unfinished allows,");
  settle(op, keys, count);
  missed_.clear();
  store_->access(op, user_id_, keys, count, values_for(op, values), missed_);
  if (missed_.empty()) return -1;
  const std::int64_t timestamp = ask_owners(op, keys, count, values, std::move(holder));
  count_traffic();
  return timestamp;
}

void Worker::access_and_wait(Op op, const std::int64_t* keys, std::size_t count, std::byte* values,
                             std::size_t size_bytes) {
  const std::int64_t request_id = next_request_id_;
  try {
    wait(access(op, keys, count, values, size_bytes, nullptr));
  } catch (...) {
    if (const auto found = pending_.find(request_id); found != pending_.end()) found->second.places.clear();
    throw;
  }
}

bool Worker::pull_if_local(const std::int64_t* keys, std::size_t count, std::byte* values,
                           std::size_t size_bytes) {
  check_size(Op::kPull, keys, count, size_bytes);
  store_->membership().check_peers();
  settle(Op::kPull, keys, count);
  missed_.clear();
  for (std::size_t done = 0; done < count; done += kKeysPerTrial) {
    const std::size_t some = std::min(kKeysPerTrial, count - done);
    store_->access(Op::kPull, user_id_, keys + done, some, {.to = values}, missed_);
    if (!missed_.empty()) return false;
    values += store_->value_bytes(Op::kPull, keys + done, some);
  }
  return true;
}

UnfinishedKeys::Class Worker::class_of(Op op) const {
  const bool adds = op == Op::kPush && store_->header().rule.kind == RuleKind::kAdd;
  return adds ? UnfinishedKeys::Class::kAdd : UnfinishedKeys::Class::kOther;
}

// Waits for the unfinished operations that this one must not overtake.
void Worker::settle(Op op, const std::int64_t* keys, std::size_t count) {
  const UnfinishedKeys::Class operation = class_of(op);
  const bool commutes_with_all = operation == UnfinishedKeys::Class::kAdd && num_others_ == 0;
  if (pending_.empty() || commutes_with_all) return;
  count_unfinished_keys();
  for (std::size_t i = 0; i < count && unfinished_keys_.size() > 0; ++i) {
    const std::int64_t key = keys[i];
    if (!unfinished_keys_.conflicts(key, operation)) continue;
    wait_until([&] { return !unfinished_keys_.conflicts(key, operation); },
               "an earlier operation on the same keys");
  }
}

// Only where there are several operations at a time; one that is waited for at once is never counted.
void Worker::count_unfinished_keys() {
  for (; first_uncounted_ < next_request_id_; ++first_uncounted_) {
    const auto found = pending_.find(first_uncounted_);
    if (found == pending_.end()) continue;
    Pending& pending = found->second;
    for (const std::int64_t key : pending.keys) unfinished_keys_.add(key, class_of(pending.op));
    pending.counted = true;
  }
}

void Worker::finish(std::int64_t request_id) {
  const auto found = pending_.find(request_id);
  const UnfinishedKeys::Class operation = class_of(found->second.op);
  if (found->second.counted)
    for (const std::int64_t key : found->second.keys) unfinished_keys_.remove(key, operation);
  num_others_ -= operation == UnfinishedKeys::Class::kOther ? 1 : 0;
  pending_.erase(found);
  if (pending_.empty()) first_uncounted_ = next_request_id_;
}

void Worker::wait(std::int64_t timestamp) {
  if (timestamp >= next_request_id_)
    throw Error(Code::kArgument, "parameters: timestamp " + std::to_string(timestamp) +
                                     " was not returned by this worker; the last one is " +
                                     std::to_string(next_request_id_ - 1));
  wait_until([this, timestamp] { return timestamp < 0 || !pending_.contains(timestamp); }, "an operation");
}

void Worker::wait_all() {
  wait_until([this] { return pending_.empty(); }, "all operations");
}

bool Worker::is_finished(std::int64_t timestamp) {
  while (endpoint_ && receive(std::chrono::microseconds(0))) {
  }
  store_->membership().check_peers();
  return timestamp < 0 || !pending_.contains(timestamp);
}

bool Worker::receive(std::chrono::microseconds timeout) {
  if (!early_.empty()) {
    if (take_early_answers()) return true;
    timeout = std::min(timeout, kReplicaPoll);
  }
  Header header;
  Message message;
  if (!endpoint_->receive(header, message, timeout)) return false;
  try {
    if (header.kind == Kind::kReply) take_answer({header.count, std::move(message)});
  } catch (const Error&) {
    store_->count(user_id_, kProtocolErrors, 1);
  }
  count_traffic();
  return true;
}

// A worker that accesses only local rows sends no request, and would not notice that its node stopped.
void Worker::look_at_leader() {
  if (is_leader_) return;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_look_) return;
  next_look_ = now + kLook;
  store_->membership().check_leader();
}

// Moves what the endpoint has counted into the node's statistics.
void Worker::count_traffic() {
  store_->count(user_id_, kSentBytes, std::exchange(endpoint_->sent_bytes, 0));
  store_->count(user_id_, kReceivedBytes, std::exchange(endpoint_->received_bytes, 0));
  store_->count(user_id_, kSentMessages, std::exchange(endpoint_->sent_messages, 0));
  store_->count(user_id_, kReceivedMessages, std::exchange(endpoint_->received_messages, 0));
}

void Worker::wait_until(const std::function<bool()>& done, const char* what) {
  const auto start = std::chrono::steady_clock::now();
  auto next_look = start + kSlice;
  while (!done()) {
    receive(kSlice);
    const auto now = std::chrono::steady_clock::now();
    if (now < next_look) continue;
    next_look = now + kSlice;
    store_->membership().check_leader();
    if (interrupt_) interrupt_();
    if (now - start > options_.timeout)
      throw Error(Code::kTimeout, "parameters: node " + std::to_string(store_->header().node) + ", worker " +
                                      std::to_string(user_id_ - kMaxChannels) + ": waiting for " + what +
                                      " did not end within " + with_seconds(seconds_since(start)) + " (" +
                                      std::to_string(pending_.size()) +
                                      " operations are unfinished); is a node overloaded or stopped?");
  }
}

void Worker::intent(const std::int64_t* keys, std::size_t count, std::int64_t start, std::int64_t end) {
  store_->value_bytes(Op::kPull, keys, count);  // checks the range
  if (end <= start)
    throw Error(Code::kArgument, "parameters: an intent for the clocks [" + std::to_string(start) + ", " +
                                     std::to_string(end) + ") is empty; end is exclusive");
  store_->membership().check_peers();
  look_at_leader();
  if (!endpoint_ || end <= clock() || count == 0) return;
  const SlabHeader& header = store_->header();
  const std::uint32_t channels = header.num_channels;
  std::vector<Writer> writers;
  std::vector<std::uint32_t> counts(channels, 0);
  writers.reserve(channels);
  for (std::uint32_t c = 0; c < channels; ++c) {
    writers.emplace_back(sizeof(IntentHead) + count * sizeof(std::int64_t));
    writers.back().put(IntentHead{start, end});
  }
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t channel = channels == 1 ? 0 : store_->header().channel_of(keys[i]);
    writers[channel].put(keys[i]);
    ++counts[channel];
  }
  for (std::uint32_t c = 0; c < channels; ++c)
    if (counts[c] != 0)
      endpoint_->send(channel_endpoint(header.node, c), Kind::kIntent, counts[c], writers[c].finish());
}

std::int64_t Worker::advance_clock() {
  auto& clock = store_->users()[user_id_].clock;
  const std::int64_t now = clock.load(std::memory_order_relaxed) + 1;
  clock.store(now, std::memory_order_release);
  return now;
}

std::int64_t Worker::clock() const { return store_->users()[user_id_].clock.load(std::memory_order_relaxed); }

void Worker::wait_sync() {
  wait_all();
  if (!endpoint_) return;
  SlabHeader& header = store_->header();
  std::vector<std::uint64_t> wanted(header.num_channels);
  for (std::uint32_t c = 0; c < header.num_channels; ++c) {
    wanted[c] = header.boards[c].sync.requested.fetch_add(1) + 1;
    // An idle channel sleeps until a message comes.
    endpoint_->send(channel_endpoint(header.node, c), Kind::kHeartbeat, 0, Writer(0).finish());
  }
  const auto all_done = [&] {
    for (std::uint32_t c = 0; c < header.num_channels; ++c)
      if (header.boards[c].sync.done.load() < wanted[c]) return false;
    return true;
  };
  const auto start = std::chrono::steady_clock::now();
  for (auto next_look = start + kSlice; !all_done();) {
    std::this_thread::sleep_for(kSyncPoll);
    const auto now = std::chrono::steady_clock::now();
    if (now < next_look) continue;
    next_look = now + kSlice;
    store_->membership().check_leader();
    if (interrupt_) interrupt_();
    if (now - start > options_.timeout)
      throw Error(Code::kTimeout, "parameters: node " + std::to_string(header.node) +
                                      ": wait_sync (send this node's updates, refresh all replicas) did not "
                                      "end within " +
                                      with_seconds(seconds_since(start)));
  }
}

void Worker::finalize() {
  if (finalized_ || origin_.is_forked()) return;
  finalized_ = true;
  try {
    wait_all();
  } catch (...) {
    store_->membership().leave(user_id_);
    throw;
  }
  store_->membership().leave(user_id_);
}

}  // namespace torchrelay::parameters
