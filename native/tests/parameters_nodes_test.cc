#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <list>
#include <random>
#include <thread>

#include "check.h"
#include "net/delayed_network.h"
#include "net/memory_network.h"
#include "parameters/node_service.h"

using namespace torchrelay;
using namespace torchrelay::parameters;
using std::chrono::milliseconds;

namespace {

constexpr std::uint32_t kLength = 4;

// Nodes of one process over one network.
struct Cluster {
  std::shared_ptr<Network> network;
  std::vector<std::shared_ptr<Store>> stores;
  std::vector<std::unique_ptr<NodeService>> services;
  ChannelAddresses addresses;

  Cluster(std::uint32_t nodes, const StoreSpec& spec, const FaultInjection& faults,
          const ChannelOptions& options)
      : Cluster(std::make_shared<DelayedNetwork>(std::make_shared<MemoryNetwork>(), faults), nodes, spec,
                options) {}

  Cluster(std::shared_ptr<Network> over, std::uint32_t nodes, StoreSpec spec, const ChannelOptions& options)
      : network(std::move(over)) {
    spec.num_nodes = nodes;
    for (spec.node = 0; spec.node < nodes; ++spec.node) {
      stores.push_back(Store::create(spec));
      services.push_back(std::make_unique<NodeService>(stores.back(), network, options));
      for (const std::string& address : services.back()->addresses()) addresses.push_back(address);
    }
    for (const auto& service : services) service->start(addresses);
  }

  std::unique_ptr<Worker> worker(std::uint32_t node, std::uint32_t number) {
    return std::make_unique<Worker>(stores[node], number, network, addresses,
                                    WorkerOptions{milliseconds(30000), 1024}, nullptr);
  }

  // By the thread of the node's worker 0.
  State state(std::uint32_t node, std::int64_t entry_index) const {
    return LockedEntry(*stores[node], entry_index, kMaxChannels)->state;
  }
};

// Holds back messages of one kind from one node to another, for as long as it is told to.
class HoldingNetwork final : public Network {
 public:
  struct Held {
    Held(Kind held, std::uint32_t sender, std::string receiver)
        : kind(held), from(sender), to(std::move(receiver)) {}
    Kind kind;
    std::uint32_t from;
    std::string to;
    std::atomic<bool> on = false;
    std::atomic<int> count = 0;  // held now
  };

  // Before the nodes that it is about are there.
  Held& hold(Kind kind, std::uint32_t from, std::uint32_t to) {
    return held_.emplace_back(kind, from, "node" + std::to_string(to));
  }
  std::unique_ptr<Endpoint> open(const std::string& label) override {
    return std::make_unique<HoldingEndpoint>(memory_.open(label), held_, label);
  }

 private:
  class HoldingEndpoint final : public Endpoint {
   public:
    HoldingEndpoint(std::unique_ptr<Endpoint> endpoint, std::list<Held>& held, std::string label)
        : endpoint_(std::move(endpoint)), held_(held), label_(std::move(label)) {}
    std::string address() const override { return endpoint_->address(); }
    void connect(std::uint32_t peer, const std::string& address) override {
      endpoint_->connect(peer, address);
    }
    void disconnect(std::uint32_t peer) override { endpoint_->disconnect(peer); }
    void send(std::uint32_t peer, Message message) override { endpoint_->send(peer, std::move(message)); }
    bool receive(Message& message, std::chrono::microseconds timeout) override {
      const auto free = std::ranges::find_if(back_, [](const auto& held) { return !held.first->on; });
      if (free != back_.end()) {
        message = std::move(free->second);
        --free->first->count;
        back_.erase(free);
        return true;
      }
      if (!endpoint_->receive(message, timeout)) return false;
      Header header;
      std::memcpy(&header, message.data(), sizeof header);
      for (Held& held : held_) {
        if (!held.on || held.kind != header.kind || held.from != node_of(header.sender) || held.to != label_)
          continue;
        back_.emplace_back(&held, std::move(message));
        ++held.count;
        return false;
      }
      return true;
    }

   private:
    std::unique_ptr<Endpoint> endpoint_;
    std::list<Held>& held_;
    std::string label_;
    std::vector<std::pair<Held*, Message>> back_;
  };

  MemoryNetwork memory_;
  std::list<Held> held_;
};

template <typename Condition>
void eventually(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    CHECK(std::chrono::steady_clock::now() < end);
    std::this_thread::sleep_for(milliseconds(1));
  }
}

StoreSpec dense(std::uint64_t num_keys, std::uint32_t channels = 2) {
  StoreSpec spec;
  spec.lengths = {kLength};
  spec.num_keys = num_keys;
  spec.num_channels = channels;
  return spec;
}

// Adagrad whose steps subtract the gradient exactly: beside such an eps, the root of the state is nothing.
StoreSpec with_state(StoreSpec spec) {
  spec.rule.kind = RuleKind::kAdagrad;
  spec.rule.learning_rate = spec.rule.eps = 0x1p40;
  return spec;
}

void access(Worker& worker, Op op, const std::vector<std::int64_t>& keys, std::vector<float>& values,
            bool wait = true) {
  const std::int64_t timestamp =
      worker.access(op, keys.data(), keys.size(), reinterpret_cast<std::byte*>(values.data()),
                    values.size() * sizeof(float), nullptr);
  if (wait) worker.wait(timestamp);
}

// Key 0, and three nodes that want it in turn.
struct Moves {
  Cluster cluster;
  std::vector<std::unique_ptr<Worker>> workers;  // one per node

  // Replicas send updates smaller than `sync_threshold` only when they are given up.
  explicit Moves(std::shared_ptr<Network> network, double sync_threshold = 0)
      : Moves(std::move(network), dense(3, 1), options(sync_threshold)) {}
  Moves(std::shared_ptr<Network> network, const StoreSpec& spec, const ChannelOptions& options)
      : cluster(std::move(network), 3, spec, options) {
    for (std::uint32_t node = 0; node < 3; ++node) workers.push_back(cluster.worker(node, 0));
  }
  static ChannelOptions options(double sync_threshold) {
    ChannelOptions options;
    options.hysteresis_rounds = 0;
    options.sync_threshold = sync_threshold;
    return options;
  }
  Entry& at(std::uint32_t node) const { return cluster.stores[node]->entry(0); }
  State state(std::uint32_t node) const { return cluster.state(node, 0); }

  // Until its worker's clock advances. The node knows of it when this returns.
  void wants(std::uint32_t node) {
    const std::int64_t key = 0;
    workers[node]->intent(&key, 1, workers[node]->clock(), workers[node]->clock() + 1);
    pass_rounds(node);
  }
  // Until the node has begun and ended a round.
  void pass_rounds(std::uint32_t node) const {
    const auto& rounds = cluster.stores[node]->header().stats[0][kRounds];
    const std::uint64_t before = rounds;
    eventually([&] { return rounds >= before + 2; });
  }
};

// A pull, and what its worker had written to the keys when it began.
struct Read {
  std::vector<std::int64_t> keys;
  std::vector<std::int64_t> written;  // to each of the keys
  std::vector<float> values;
  std::int64_t timestamp = -1;
};

// Checks a worker's reads in the order in which it began them, however they end.
class Reads {
 public:
  Reads(std::size_t num_keys, std::int64_t own_key) : seen_(num_keys, 0), own_key_(own_key) {}

  void begin(Worker& worker, const std::vector<std::int64_t>& keys, const std::vector<std::int64_t>& written,
             bool wait) {
    Read& read = unchecked_.emplace_back();
    read.keys = keys;
    for (const std::int64_t key : keys) read.written.push_back(written[static_cast<std::size_t>(key)]);
    read.values.resize(keys.size() * kLength);
    read.timestamp = worker.access(Op::kPull, read.keys.data(), keys.size(),
                                   reinterpret_cast<std::byte*>(read.values.data()),
                                   read.values.size() * sizeof(float), nullptr);
    if (wait) worker.wait(read.timestamp);
  }
  void check_finished(Worker& worker) {
    for (; !unchecked_.empty() && worker.is_finished(unchecked_.front().timestamp); unchecked_.pop_front())
      check(unchecked_.front());
  }
  const std::string& failure() const { return failure_; }

 private:
  // Values never fall, nor below what the worker had written; a key that it alone writes has just that.
  void check(const Read& read) {
    const std::vector<float> before = seen_;  // a key's reads within one batch are in no order
    for (std::size_t i = 0; i < read.keys.size(); ++i) {
      const auto key = static_cast<std::size_t>(read.keys[i]);
      const float value = read.values[i * kLength], written = static_cast<float>(read.written[i]);
      const std::string what = "key " + std::to_string(key) + " is " + std::to_string(value);
      for (std::uint32_t j = 1; j < kLength; ++j)
        if (read.values[i * kLength + j] != value) failure_ = what + " in a torn row";
      if (value < before[key]) failure_ = what + " after " + std::to_string(before[key]);
      if (value < written) failure_ = what + " where its reader had written " + std::to_string(written);
      if (read.keys[i] == own_key_ && value > written) failure_ = what + ": a later write of its reader";
      seen_[key] = std::max(seen_[key], value);
    }
  }

  std::vector<float> seen_;
  std::int64_t own_key_;
  std::list<Read> unchecked_;
  std::string failure_;
};

// Every worker pushes and pulls random keys while intents come and go. Each row's elements count its pushes;
// what a worker sees of a key never falls, nor below what it pushed itself; in the end all sums are exact.
// Every worker also has a key that only it writes, by sets and by pushes, counting up: it sees each of them
// at once, and no later one in a pull that was still unfinished.
// In a table with optimizer state, most intents are for one clock, so that rows are lent.
void random_load(Techniques techniques, const FaultInjection& faults, std::uint32_t nodes,
                 std::uint32_t workers, int steps, double max_rounds_per_s = 1000, bool lends = false) {
  constexpr std::uint64_t kCounters = 60;
  const std::uint64_t num_keys = kCounters + nodes * workers;
  ChannelOptions options;
  options.techniques = techniques;
  options.max_rounds_per_s = max_rounds_per_s;
  Cluster cluster(nodes, lends ? with_state(dense(num_keys)) : dense(num_keys), faults, options);
  const float one = lends ? -1.0f : 1.0f;  // what a push of it adds to a value is 1
  std::vector<std::vector<std::int64_t>> written(nodes * workers, std::vector<std::int64_t>(num_keys, 0));
  std::vector<std::string> failures(nodes * workers);
  std::barrier all(nodes * workers);
  std::vector<std::thread> threads;
  std::vector<std::vector<float>> finals(nodes * workers);
  for (std::uint32_t w = 0; w < nodes * workers; ++w)
    threads.emplace_back([&, w] {
      try {
        auto worker = cluster.worker(w / workers, w % workers);
        std::mt19937_64 random(w);
        Reads reads(num_keys, static_cast<std::int64_t>(kCounters + w));
        const std::vector<std::int64_t> own = {static_cast<std::int64_t>(kCounters + w)};
        std::vector<std::vector<std::int64_t>> upcoming;
        for (int step = 0; step < steps; ++step) {
          std::vector<std::int64_t> keys(8);
          for (auto& key : keys) key = static_cast<std::int64_t>(random() % kCounters);
          keys.push_back(static_cast<std::int64_t>(kCounters + random() % (nodes * workers)));
          upcoming.push_back(keys);
          const auto longer = static_cast<std::int64_t>(random() % 10);
          const bool once = lends && random() % 4 != 0;
          worker->intent(keys.data(), keys.size(), step + 5, once ? step + 6 : step + 7 + longer);
          worker->advance_clock();
          if (step < 5) continue;
          auto now = upcoming[static_cast<std::size_t>(step) - 5];
          const std::vector<std::int64_t> counters(now.begin(), now.end() - 1);
          std::vector<float> ones(counters.size() * kLength, one);
          access(*worker, Op::kPush, counters, ones, random() % 2 == 0);
          for (const auto key : counters) ++written[w][static_cast<std::size_t>(key)];
          const auto count = static_cast<float>(++written[w][kCounters + w]);
          const bool sets = random() % 2 == 0;
          std::vector<float> next(kLength, sets ? count : one);
          access(*worker, sets ? Op::kSet : Op::kPush, own, next, random() % 2 == 0);
          now.push_back(own[0]);
          reads.begin(*worker, now, written[w], random() % 2 == 0);
          reads.check_finished(*worker);
        }
        worker->wait_all();
        reads.check_finished(*worker);
        failures[w] = reads.failure();
        worker->wait_sync();
        all.arrive_and_wait();
        std::vector<std::int64_t> keys(num_keys);
        for (std::size_t i = 0; i < num_keys; ++i) keys[i] = static_cast<std::int64_t>(i);
        finals[w].resize(num_keys * kLength);
        access(*worker, Op::kPull, keys, finals[w]);
        all.arrive_and_wait();
      } catch (const std::exception& error) {
        failures[w] = error.what();
        all.arrive_and_drop();
      }
    });
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures)
    if (!failure.empty()) throw testing::Failure{failure};
  for (std::uint64_t key = 0; key < num_keys; ++key) {
    std::int64_t expected = 0;
    for (const auto& counts : written) expected += counts[key];
    for (const auto& values : finals) CHECK(values[key * kLength] == static_cast<float>(expected));
  }
  std::uint64_t relocations = 0, replicas = 0;
  for (const auto& store : cluster.stores) {
    relocations += store->total(kRelocationsIn);
    replicas += store->total(kReplicasMade);
    CHECK(store->total(kProtocolErrors) == 0);
  }
  if (techniques != Techniques::kReplicationOnly) CHECK(relocations > 0);
  if (techniques != Techniques::kRelocationOnly) CHECK(replicas > 0);
}

}  // namespace

TEST(sums_are_exact_with_relocation_and_replication) { random_load(Techniques::kAll, {}, 3, 2, 400); }
TEST(sums_are_exact_with_replication_only) { random_load(Techniques::kReplicationOnly, {}, 3, 2, 400); }
TEST(sums_are_exact_with_relocation_only) { random_load(Techniques::kRelocationOnly, {}, 3, 2, 400); }

TEST(sums_are_exact_over_a_network_that_delays_reorders_and_duplicates) {
  const FaultInjection faults{std::chrono::microseconds(10000), 0.2, 7};
  for (const Techniques techniques :
       {Techniques::kAll, Techniques::kReplicationOnly, Techniques::kRelocationOnly})
    random_load(techniques, faults, 3, 2, 100);
}

TEST(reads_and_writes_of_a_key_keep_their_order_over_links_with_delays) {
  for (std::uint64_t seed = 0; seed < 3; ++seed)
    random_load(Techniques::kAll, {std::chrono::microseconds(2000), 0, seed, std::chrono::microseconds(1000)},
                3, 2, 150);
}

TEST(sums_are_exact_with_rare_rounds) {
  random_load(Techniques::kAll, {std::chrono::microseconds(500), 0.1, 3}, 2, 2, 150, 50);
}

TEST(sums_are_exact_with_loans) { random_load(Techniques::kAll, {}, 3, 2, 400, 1000, true); }

TEST(sums_are_exact_with_loans_over_bad_networks_and_rare_rounds) {
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    random_load(Techniques::kAll, {std::chrono::microseconds(10000), 0.2, seed}, 3, 2, 100, 1000, true);
    random_load(Techniques::kAll, {std::chrono::microseconds(2000), 0, seed, std::chrono::microseconds(1000)},
                3, 2, 150, 1000, true);
    random_load(Techniques::kAll, {std::chrono::microseconds(500), 0.1, seed}, 2, 2, 150, 50, true);
  }
}

// A push to node 0 is under way while node 1 gets a replica of the key and gives it up. Node 0, which knows
// of no replica any more, answers at once; what ends the replica comes later.
TEST(an_answer_waits_for_the_end_of_a_replica_that_lacks_it) {
  const std::vector<std::int64_t> key = {0};
  std::vector<float> value(kLength, 1.0f);
  auto network = std::make_shared<HoldingNetwork>();
  auto &requests = network->hold(Kind::kRequest, 1, 0), &bundles = network->hold(Kind::kBundle, 0, 1);
  ChannelOptions options;
  options.techniques = Techniques::kReplicationOnly;
  Cluster cluster(network, 2, dense(2, 1), options);
  const auto pushes = cluster.worker(1, 0), announces = cluster.worker(1, 1);
  const Entry& owned = cluster.stores[0]->entry(0);

  requests.on = true;
  const std::int64_t push = pushes->access(
      Op::kPush, key.data(), 1, reinterpret_cast<std::byte*>(value.data()), kLength * sizeof(float), nullptr);
  announces->intent(key.data(), 1, 0, 1);
  eventually([&] { return cluster.stores[1]->total(kReplicasMade) == 1; });
  CHECK(owned.has(kShared));
  bundles.on = true;
  announces->advance_clock();
  eventually([&] { return !owned.has(kShared); });
  requests.on = false;
  const auto end = std::chrono::steady_clock::now() + milliseconds(200);
  while (std::chrono::steady_clock::now() < end) CHECK(!pushes->is_finished(push));
  bundles.on = false;
  pushes->wait(push);
  access(*pushes, Op::kPull, key, value);
  CHECK(value[0] == 1);
  CHECK(cluster.state(1, 0) == State::kAbsent);
}

// The last update of node 1's replica is under way to node 0 while the key goes from there to node 1, to node
// 2, and back to node 0. It is in the row by then.
TEST(an_update_that_comes_after_the_key_itself_is_not_counted_twice) {
  const std::vector<std::int64_t> key = {0};
  std::vector<float> value(kLength, 1.0f);
  auto network = std::make_shared<HoldingNetwork>();
  auto& updates = network->hold(Kind::kBundle, 1, 0);
  Moves moves(network);
  moves.wants(0);
  moves.wants(1);
  eventually([&] { return moves.state(1) == State::kReplica; });
  updates.on = true;
  access(*moves.workers[1], Op::kPush, key, value);
  eventually([&] { return updates.count > 0; });
  moves.workers[0]->advance_clock();
  eventually([&] { return moves.state(1) == State::kOwned; });
  moves.workers[1]->advance_clock();
  moves.wants(2);
  eventually([&] { return moves.state(2) == State::kOwned; });
  moves.workers[2]->advance_clock();
  moves.wants(0);
  eventually([&] { return moves.state(0) == State::kOwned; });
  updates.on = false;
  eventually([&] { return updates.count == 0; });
  access(*moves.workers[1], Op::kPull, key, value);
  CHECK(value[0] == 1);
  for (const auto& store : moves.cluster.stores) CHECK(store->total(kProtocolErrors) == 0);
}

// A pull of node 1 is under way to node 0 when the key comes to node 1: what the worker does next would be
// done here, before the pull.
TEST(a_push_does_not_overtake_an_unfinished_pull) {
  const std::vector<std::int64_t> key = {0};
  std::vector<float> pulled(kLength, -1.0f), pushed(kLength, 1.0f), here(kLength, -1.0f);
  auto network = std::make_shared<HoldingNetwork>();
  auto& requests = network->hold(Kind::kRequest, 1, 0);
  ChannelOptions options;
  options.techniques = Techniques::kReplicationOnly;
  Cluster cluster(network, 2, dense(2, 1), options);
  const auto worker = cluster.worker(1, 0);
  requests.on = true;
  const std::int64_t pull =
      worker->access(Op::kPull, key.data(), 1, reinterpret_cast<std::byte*>(pulled.data()),
                     kLength * sizeof(float), nullptr);
  eventually([&] { return requests.count > 0; });
  worker->intent(key.data(), 1, 0, 1);
  eventually([&] { return cluster.stores[1]->total(kReplicasMade) == 1; });
  std::thread release([&] {
    std::this_thread::sleep_for(milliseconds(100));
    requests.on = false;
  });
  access(*worker, Op::kPush, key, pushed);
  release.join();
  worker->wait(pull);
  access(*worker, Op::kPull, key, here);
  CHECK(pulled[0] == 0);
  CHECK(here[0] == 1);
}

// The caller's buffer is gone, perhaps, when the answer comes.
TEST(what_answers_an_interrupted_pull_is_not_written) {
  const std::vector<std::int64_t> key = {1};
  std::vector<float> pulled(kLength, -1.0f), again(kLength, -1.0f);
  auto network = std::make_shared<HoldingNetwork>();
  auto& requests = network->hold(Kind::kRequest, 0, 1);
  Cluster cluster(network, 2, dense(2, 1), {});
  requests.on = true;
  Worker worker(cluster.stores[0], 0, network, cluster.addresses, {}, [&] {
    if (requests.count > 0) throw Error(Code::kUnavailable, "interrupted");
  });
  CHECK_THROWS(Code::kUnavailable,
               worker.access_and_wait(Op::kPull, key.data(), 1, reinterpret_cast<std::byte*>(pulled.data()),
                                      kLength * sizeof(float)));
  CHECK(worker.unfinished() == 1);
  requests.on = false;
  eventually([&] { return requests.count == 0; });
  worker.wait_all();
  CHECK(pulled[0] == -1);
  access(worker, Op::kPull, key, again);
  CHECK(again[0] == 0);
}

// Node 2 knows node 1's worker, which ends. What its successor asks, node 0 sends on to node 2.
TEST(a_successor_of_a_known_worker_is_answered_by_who_has_not_met_it) {
  std::vector<float> value(kLength);
  Moves moves(std::make_shared<HoldingNetwork>());
  access(*moves.workers[1], Op::kPull, {2}, value);
  moves.workers[1].reset();
  moves.wants(2);
  eventually([&] { return moves.state(2) == State::kOwned; });
  const auto successor = moves.cluster.worker(1, 0);
  access(*successor, Op::kPull, {0}, value);
  CHECK(moves.cluster.stores[0]->total(kForwards) == 1);
}

// Node 2 hears from node 0 only why node 1 has left, though node 0 then leaves too.
TEST(the_first_loss_is_what_all_nodes_name) {
  auto network = std::make_shared<HoldingNetwork>();
  auto& losses = network->hold(Kind::kLoss, 1, 2);
  auto& goodbyes = network->hold(Kind::kGoodbye, 1, 2);
  Cluster cluster(network, 3, dense(3, 1), {});
  losses.on = goodbyes.on = true;
  cluster.stores[1]->membership().abort_membership();
  eventually([&] { return cluster.stores[0]->membership().loss().how != Loss::kNone; });
  cluster.stores[0]->membership().abort_membership();
  cluster.services[0]->stop();
  eventually([&] { return cluster.stores[2]->header().departed_node != 0; });
  const Loss first{Loss::kLeft, 1, getpid()};
  for (const auto& store : cluster.stores) CHECK(store->membership().loss() == first);
  CHECK_THROWS(Code::kPeerLost, cluster.stores[2]->membership().check_peers());
}

TEST(a_loss_is_named_also_after_a_shutdown) {
  Cluster cluster(2, dense(2, 1), {}, {});
  Store& store = *cluster.stores[0];
  cluster.services[1]->stop();
  eventually([&] { return store.header().departed_node == 2; });
  CHECK_THROWS(Code::kPeerLost, store.membership().check_peers());
  cluster.services[0]->stop();  // as all do in the end
  CHECK_THROWS(Code::kUnavailable, store.membership().check_peers());
  store.membership().lose({Loss::kUnreachable, 1, 0});
  CHECK_THROWS(Code::kPeerLost, store.membership().check_peers());
}

// What a mark stands for may be gone, and its place in a dynamic table another channel's by now.
TEST(a_round_leaves_the_keys_of_other_channels_alone) {
  constexpr std::int64_t kKey = 6;  // of node 0 and channel 1
  const std::vector<std::int64_t> key = {kKey};
  std::vector<float> value(kLength, 1.0f);
  StoreSpec spec;
  spec.lengths = {kLength};
  spec.capacity = 64;
  spec.num_channels = 2;
  ChannelOptions options;
  options.techniques = Techniques::kReplicationOnly;
  Cluster cluster(2, spec, {}, options);
  const auto worker = cluster.worker(1, 0);
  worker->intent(key.data(), 1, 0, 1);
  eventually([&] { return cluster.stores[1]->total(kReplicasMade) == 1; });
  for (const auto& store : cluster.stores) {
    store->changed(0).mark(static_cast<std::uint64_t>(store->index().find(kKey)));
    const auto& rounds = store->header().stats[0][kRounds];
    const std::uint64_t before = rounds;
    eventually([&] { return rounds >= before + 2; });
  }
  CHECK(cluster.state(1, cluster.stores[1]->index().find(kKey)) == State::kReplica);
  CHECK(!cluster.stores[1]->entry(cluster.stores[1]->index().find(kKey)).has(kLeaving));
  access(*worker, Op::kPush, key, value);
  worker->wait_sync();
  access(*cluster.worker(0, 0), Op::kPull, key, value);
  CHECK(value[0] == 1);
  for (const auto& store : cluster.stores) CHECK(store->total(kProtocolErrors) == 0);
}

// What ends node 1's replica is under way to it while the key moves on from node 0 to node 2. The push is
// sent with the end of the replica: of an earlier update the acknowledgement would be held too, and the end
// wait.
TEST(a_set_waits_for_the_end_of_a_replica_that_is_given_up) {
  const std::vector<std::int64_t> key = {0};
  std::vector<float> pushed(kLength, 1.0f), set(kLength, 5.0f), pulled(kLength);
  auto network = std::make_shared<HoldingNetwork>();
  auto& ends = network->hold(Kind::kBundle, 0, 1);
  Moves moves(network, 100);
  moves.wants(0);
  moves.wants(1);
  eventually([&] { return moves.state(1) == State::kReplica; });
  ends.on = true;
  access(*moves.workers[1], Op::kPush, key, pushed);
  moves.pass_rounds(1);
  moves.workers[1]->advance_clock();
  eventually([&] { return !moves.at(0).has(kShared); });
  moves.workers[0]->advance_clock();
  moves.wants(2);
  eventually([&] { return moves.state(2) == State::kOwned; });
  const std::int64_t timestamp = moves.workers[1]->access(
      Op::kSet, key.data(), 1, reinterpret_cast<std::byte*>(set.data()), kLength * sizeof(float), nullptr);
  CHECK(timestamp >= 0 && !moves.workers[1]->is_finished(timestamp));
  ends.on = false;
  moves.workers[1]->wait(timestamp);
  access(*moves.workers[2], Op::kPull, key, pulled);
  CHECK(pulled[0] == 5);
}

// Workers that push without waiting are far ahead of what their nodes have handled: keys move on while
// updates of their replicas are still queued, and what other workers are told of the key's place is newer
// than those.
TEST(sums_are_exact_when_updates_pile_up) {
  constexpr std::uint64_t kKeys = 500;
  constexpr std::size_t kBatch = 60, kSteps = 1500;
  constexpr std::uint32_t kNodes = 3, kWorkers = 6;
  for (std::uint32_t seed = 0; seed < 3; ++seed) {
    Cluster cluster(kNodes, dense(kKeys, 1), {}, {});
    std::vector<std::int64_t> batches(kWorkers * kSteps * kBatch), expected(kKeys, 0);
    std::mt19937_64 random(seed);
    for (auto& key : batches)
      ++expected[static_cast<std::size_t>(key = static_cast<std::int64_t>(random() % kKeys))];
    std::vector<std::thread> threads;
    std::barrier all(kWorkers);
    for (std::uint32_t w = 0; w < kWorkers; ++w)
      threads.emplace_back([&, w] {
        auto worker = cluster.worker(w % kNodes, w / kNodes);
        const std::int64_t* mine = batches.data() + w * kSteps * kBatch;
        std::vector<float> ones(kBatch * kLength, 1.0f);
        for (std::size_t step = 0; step < kSteps; ++step) {
          const auto clock = static_cast<std::int64_t>(step);
          if (step + 3 < kSteps) worker->intent(mine + (step + 3) * kBatch, kBatch, clock + 3, clock + 5);
          worker->access(Op::kPush, mine + step * kBatch, kBatch, reinterpret_cast<std::byte*>(ones.data()),
                         ones.size() * sizeof(float), nullptr);
          worker->advance_clock();
        }
        worker->wait_all();
        worker->wait_sync();
        all.arrive_and_wait();
      });
    for (auto& thread : threads) thread.join();
    std::vector<std::int64_t> keys(kKeys);
    for (std::size_t i = 0; i < kKeys; ++i) keys[i] = static_cast<std::int64_t>(i);
    std::vector<float> sums(kKeys * kLength);
    access(*cluster.worker(0, kWorkers), Op::kPull, keys, sums);
    for (std::size_t i = 0; i < kKeys; ++i) CHECK(sums[i * kLength] == static_cast<float>(expected[i]));
    for (const auto& store : cluster.stores) CHECK(store->total(kProtocolErrors) == 0);
  }
}

namespace {

// Key 0 of node 0, which has optimizer state, so that nodes 1 and 2 borrow it for single uses.
struct Loans : Moves {
  explicit Loans(std::shared_ptr<Network> network = std::make_shared<MemoryNetwork>(),
                 double max_rounds_per_s = 1000)
      : Moves(std::move(network), with_state(dense(3, 1)), options(max_rounds_per_s)) {}
  ~Loans() {
    for (const auto& store : cluster.stores)
      if (store->total(kProtocolErrors) != 0) std::abort();
  }
  static ChannelOptions options(double max_rounds_per_s) {
    ChannelOptions options;
    options.max_rounds_per_s = max_rounds_per_s;
    return options;
  }
  bool has_loan(std::uint32_t node) const { return at(node).has(kLent) && !at(node).has(kLeaving); }
  bool is_shared() const { return at(0).has(kShared); }
  void borrow(std::uint32_t node) {
    wants(node);
    eventually([&] { return has_loan(node); });
  }
  // Adds one to the value.
  void push(std::uint32_t node) const {
    std::vector<float> gradient(kLength, -1.0f);
    access(*workers[node], Op::kPush, {0}, gradient);
  }
  float pull(std::uint32_t node) const {
    std::vector<float> value(kLength);
    access(*workers[node], Op::kPull, {0}, value);
    return value[0];
  }
  // The sum of squared gradients.
  float state_of_row(std::uint32_t node) const {
    std::vector<float> row(2 * kLength);
    access(*workers[node], Op::kPullRow, {0}, row);
    return row[kLength];
  }
};

}  // namespace

TEST(what_is_pushed_to_a_loan_is_applied_once_by_its_owner) {
  Loans loans;
  loans.borrow(1);
  CHECK(loans.pull(1) == 0);
  loans.push(1);
  CHECK(loans.pull(1) == 1);  // by the owner: a loan is not read after a push
  CHECK(loans.pull(0) == 1);
  CHECK(loans.state_of_row(1) == 1 && loans.state_of_row(0) == 1);
  loans.workers[1]->advance_clock();
  eventually([&] { return !loans.is_shared() || loans.state(1) == State::kOwned; });
  CHECK(loans.pull(0) == 1 && loans.pull(1) == 1 && loans.pull(2) == 1);
}

TEST(a_loan_that_was_not_used_is_given_back) {
  Loans loans;
  loans.borrow(1);
  CHECK(loans.pull(1) == 0);
  loans.workers[1]->advance_clock();
  eventually([&] { return !loans.is_shared() && loans.state(1) == State::kAbsent; });
  CHECK(loans.state(0) == State::kOwned && loans.state_of_row(0) == 0);
}

TEST(pushes_of_other_nodes_reach_a_lent_row) {
  Loans loans;
  loans.borrow(1);
  loans.borrow(2);
  loans.push(0);
  loans.push(2);
  loans.push(1);
  loans.push(2);  // on what is no loan any more
  for (std::uint32_t node = 0; node < 3; ++node) loans.workers[node]->wait_sync();
  for (std::uint32_t node = 0; node < 3; ++node) CHECK(loans.pull(node) == 4);
}

TEST(a_loan_is_as_fresh_as_replicas_after_a_sync_and_after_many_rounds) {
  Loans loans;
  loans.borrow(1);
  loans.push(0);
  loans.workers[0]->wait_sync();
  CHECK(loans.has_loan(1) && loans.pull(1) == 1);
  loans.push(0);
  eventually([&] { return loans.pull(1) == 2; });
  CHECK(loans.has_loan(1));
}

TEST(a_set_ends_a_loan_and_follows_what_was_pushed_to_it) {
  Loans loans;
  std::vector<float> five(kLength, 5.0f), row(2 * kLength, 7.0f);
  loans.borrow(1);
  loans.push(1);
  access(*loans.workers[1], Op::kSet, {0}, five);
  CHECK(loans.pull(1) == 5 && loans.pull(0) == 5);
  loans.push(1);
  loans.workers[1]->wait_sync();
  CHECK(loans.pull(0) == 6);
  loans.borrow(2);
  access(*loans.workers[2], Op::kSetRow, {0}, row);
  CHECK(loans.state_of_row(0) == 7 && loans.pull(2) == 7);
  loans.workers[2]->wait_sync();
  CHECK(loans.pull(1) == 7);  // a replica by now, since node 1 used its loan more than once
}

// The gradient is under way when another node wants the key: it does not move as long as it is lent.
TEST(a_lent_row_does_not_move_before_its_gradient_has_come) {
  auto network = std::make_shared<HoldingNetwork>();
  auto& gradients = network->hold(Kind::kBundle, 1, 0);
  Loans loans(network);
  loans.borrow(1);
  gradients.on = true;
  loans.push(1);
  eventually([&] { return gradients.count > 0; });
  const std::int64_t key = 0;
  const std::int64_t now = loans.workers[2]->clock();
  loans.workers[2]->intent(&key, 1, now, now + 100);  // worth a move
  eventually([&] { return loans.state(2) == State::kReplica; });
  CHECK(loans.state(0) == State::kOwned && !loans.at(2).has(kLent));
  loans.push(2);
  gradients.on = false;
  eventually([&] { return loans.state(1) == State::kAbsent && loans.state(2) == State::kOwned; });
  for (std::uint32_t node = 0; node < 3; ++node) CHECK(loans.pull(node) == 2);
  CHECK(loans.state_of_row(0) == 2);
}

// The row comes, to stay, while the gradient of the loan waits to be sent: it is added to the row.
TEST(a_move_to_the_borrower_takes_the_gradient_in) {
  auto network = std::make_shared<HoldingNetwork>();
  auto& rows = network->hold(Kind::kBundle, 0, 1);
  Loans loans(network);
  loans.borrow(1);
  rows.on = true;
  const std::int64_t key = 0;
  const std::int64_t now = loans.workers[1]->clock();
  loans.workers[1]->intent(&key, 1, now, now + 100);
  eventually([&] { return rows.count > 0; });
  loans.push(1);
  loans.push(1);
  loans.pass_rounds(1);
  CHECK(loans.has_loan(1));
  rows.on = false;
  eventually([&] { return loans.state(1) == State::kOwned; });
  for (std::uint32_t node = 0; node < 3; ++node) CHECK(loans.pull(node) == 2);
}

// What a worker pushed to a loan is sent though the worker is gone; so is a loan that it did not use.
TEST(the_loans_of_a_worker_that_ends_are_given_back) {
  Loans loans;
  loans.borrow(1);
  loans.push(1);
  loans.workers[1].reset();
  loans.borrow(2);
  loans.workers[2].reset();
  eventually([&] { return !loans.is_shared(); });
  CHECK(loans.pull(0) == 1);
}

TEST(the_loss_of_a_lender_is_reported_before_a_push_to_its_loan) {
  Loans loans;
  loans.borrow(1);
  loans.cluster.services[0]->stop();
  eventually([&] { return loans.cluster.stores[1]->header().departed_node != 0; });
  CHECK_THROWS(Code::kPeerLost, loans.push(1));
}

// One worker's intent ends in the round in which another one's begins.
TEST(a_loan_is_lent_anew_for_another_worker) {
  Loans loans(std::make_shared<MemoryNetwork>(), 50);
  const std::int64_t key = 0;
  std::vector<std::unique_ptr<Worker>> both;
  for (std::uint32_t number = 1; number <= 2; ++number) both.push_back(loans.cluster.worker(1, number));
  for (int i = 0; i < 20; ++i) {
    loans.wants(0);  // so that the key does not move to who has borrowed it alone
    loans.workers[0]->advance_clock();
    Worker &ends = *both[static_cast<std::size_t>(i % 2)],
           &begins = *both[static_cast<std::size_t>(1 - i % 2)];
    ends.intent(&key, 1, ends.clock(), ends.clock() + 1);
    loans.pass_rounds(1);
    ends.advance_clock();
    begins.intent(&key, 1, begins.clock(), begins.clock() + 1);
    loans.pass_rounds(1);
    loans.push(0);
    loans.push(1);
    begins.advance_clock();
    loans.workers[1]->wait_sync();
    CHECK(loans.pull(0) == static_cast<float>(2 * i + 2));
  }
}

// Intents whose keys are read again after a push, and not: what was asked for beyond them is not kept alive.
TEST(no_replica_outlives_its_intents) {
  Loans loans;
  for (int i = 0; i < 10; ++i) {
    loans.wants(0);
    loans.borrow(1);
    loans.workers[1]->advance_clock();
    loans.push(1);
    CHECK(loans.pull(1) == static_cast<float>(i + 1) && loans.pull(1) == static_cast<float>(i + 1));
    loans.pass_rounds(1);
    eventually([&] { return !loans.is_shared() && loans.state(1) == State::kAbsent; });
    const std::uint64_t made = loans.cluster.stores[1]->total(kReplicasMade);
    loans.pass_rounds(1);
    CHECK(loans.cluster.stores[1]->total(kReplicasMade) == made);
    loans.workers[0]->advance_clock();
  }
}
