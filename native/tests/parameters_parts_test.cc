#include <sys/resource.h>

#include <atomic>
#include <cmath>
#include <map>
#include <random>
#include <thread>

#include "check.h"
#include "net/delayed_network.h"
#include "net/memory_network.h"
#include "net/tcp_network.h"
#include "parameters/node_service.h"

using namespace torchrelay;
using namespace torchrelay::parameters;
using std::chrono::microseconds;
using std::chrono::milliseconds;

TEST(poisson_quantiles_are_right) {
  CHECK(poisson_quantile(0, 0.9999) == 0);
  for (const double mean : {0.5, 3.0, 20.0, 900.0}) {
    double mass = std::exp(-mean), sum = mass;
    std::int64_t k = 0;
    while (mean < 700 && sum < 0.9999) sum += mass *= mean / static_cast<double>(++k);
    if (mean < 700) CHECK(poisson_quantile(mean, 0.9999) == k);  // beyond, exp(-mean) is nothing
    CHECK(std::abs(static_cast<double>(poisson_quantile(mean, 0.9999)) - mean) < 4.5 * std::sqrt(mean) + 6);
  }
  CHECK(std::abs(static_cast<double>(poisson_quantile(1e6, 0.9999)) - (1e6 + 3719)) < 5);
  CHECK(poisson_quantile(4e6, 0.9999) == 4007439);
}

TEST(intents_begin_in_time_and_expire) {
  WorkerIntents intents;
  std::vector<std::int64_t> begun, expired;
  const auto round = [&](std::int64_t clock) {
    intents.round(
        clock,
        [&](std::int64_t key, std::int64_t) {
          begun.push_back(key);
          return true;
        },
        [&](std::int64_t key) { expired.push_back(key); });
  };
  intents.announce(0, 2, {1});
  intents.announce(1000, 1001, {2});
  round(0);
  CHECK(begun == std::vector<std::int64_t>{1} && expired.empty());
  for (std::int64_t clock = 1; clock < 990; ++clock)
    round(clock);  // one tick a round: the window shrinks to 10 or so
  CHECK(begun == std::vector<std::int64_t>{1} && expired == std::vector<std::int64_t>{1});
  round(995);
  CHECK(begun.back() == 2);
  intents.announce(0, 5, {3});  // over already
  round(1001);
  CHECK(begun.size() == 2 && expired.size() == 2 && intents.empty());
  intents.announce(2000, 3000, {4});
  round(kFinished);  // the worker is gone
  CHECK(begun.size() == 2 && intents.empty());
}

TEST(unfinished_keys_are_counted_exactly) {
  using Class = UnfinishedKeys::Class;
  UnfinishedKeys keys;
  std::map<std::int64_t, std::pair<int, int>> expected;  // adds, others
  std::vector<std::pair<std::int64_t, Class>> present;
  std::mt19937_64 random(11);
  for (int step = 0; step < 50000; ++step) {
    if (present.empty() || random() % 5 < (step % 20000 < 10000 ? 3u : 2u)) {  // grows, then shrinks
      const auto key = static_cast<std::int64_t>(random() % 4000) - 2000;
      const Class operation = random() % 2 == 0 ? Class::kAdd : Class::kOther;
      keys.add(key, operation);
      ++(operation == Class::kAdd ? expected[key].first : expected[key].second);
      present.emplace_back(key, operation);
    } else {
      std::swap(present[random() % present.size()], present.back());
      const auto [key, operation] = present.back();
      present.pop_back();
      keys.remove(key, operation);
      auto& counts = expected[key];
      --(operation == Class::kAdd ? counts.first : counts.second);
      if (counts == std::pair(0, 0)) expected.erase(key);
    }
    const auto key = static_cast<std::int64_t>(random() % 4000) - 2000;
    const auto found = expected.find(key);
    const auto counts = found == expected.end() ? std::pair(0, 0) : found->second;
    CHECK(keys.conflicts(key, Class::kAdd) == (counts.second > 0));
    CHECK(keys.conflicts(key, Class::kOther) == (counts.first + counts.second > 0));
    CHECK(keys.size() == expected.size());
  }
}

TEST(marks_are_taken_once_each) {
  constexpr std::uint64_t kSize = 600000;  // three words of the highest level
  const auto memory = std::make_unique<MarkSet::Word[]>(MarkSet::bytes(kSize) / sizeof(MarkSet::Word));
  const MarkSet marks(reinterpret_cast<std::byte*>(memory.get()), kSize);
  std::vector<std::uint64_t> taken;
  const auto take = [&] {
    taken.clear();
    marks.take_all([&](std::uint64_t index) { taken.push_back(index); });
    return taken;
  };
  CHECK(take().empty());
  for (const std::uint64_t index : {std::uint64_t{0}, std::uint64_t{63}, std::uint64_t{64},
                                    std::uint64_t{300000}, std::uint64_t{300000}, kSize - 1})
    marks.mark(index);
  CHECK(take() == std::vector<std::uint64_t>{0, 63, 64, 300000, kSize - 1});
  CHECK(take().empty());
  marks.mark(5);
  marks.take_all([&](std::uint64_t index) { marks.mark(index); });  // while it is taken: for the next time
  CHECK(take() == std::vector<std::uint64_t>{5});
}

// What a thread counted up before it marked is seen by who takes the mark.
TEST(no_mark_is_lost_between_threads) {
  constexpr std::uint64_t kSize = 300000;
  constexpr int kThreads = 3, kMarks = 50000;
  const auto memory = std::make_unique<MarkSet::Word[]>(MarkSet::bytes(kSize) / sizeof(MarkSet::Word));
  const MarkSet marks(reinterpret_cast<std::byte*>(memory.get()), kSize);
  std::vector<std::atomic<int>> counted(kSize);
  std::atomic<int> running = kThreads;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      std::mt19937_64 random(static_cast<std::uint64_t>(t));
      for (int i = 0; i < kMarks; ++i) {
        const std::uint64_t index = random() % 400 * 700;  // few, far apart: words often become empty
        counted[index].fetch_add(1);
        marks.mark(index);
      }
      --running;
    });
  int total = 0;
  const auto take = [&] {
    marks.take_all([&](std::uint64_t index) { total += counted[index].exchange(0); });
  };
  while (running > 0) take();
  for (auto& thread : threads) thread.join();
  take();
  CHECK(total == kThreads * kMarks);
}

TEST(a_reliable_endpoint_restores_the_order_of_messages) {
  DelayedNetwork network(std::make_shared<MemoryNetwork>(), {microseconds(3000), 0.3, 5});
  ReliableEndpoint sender(network.open("a"), worker_endpoint(0, 1), 1),
      receiver(network.open("b"), channel_endpoint(0, 0), 1);
  sender.connect(receiver.id(), receiver.address());
  for (std::uint32_t i = 0; i < 300; ++i) {
    Writer writer(4);
    writer.put(i);
    sender.send(receiver.id(), Kind::kIntent, i, writer.finish());
  }
  Header header;
  Message message;
  for (std::uint32_t i = 0; i < 300; ++i) {
    CHECK(receiver.receive(header, message, milliseconds(2000)));
    CHECK(header.count == i && header.sender == sender.id());
  }
  CHECK(!receiver.receive(header, message, milliseconds(20)));
  CHECK(receiver.duplicates > 0 && receiver.knows(sender.id()));
}

TEST(a_message_that_is_too_large_leaves_no_gap) {
  NetworkOptions options;
  options.max_message_bytes = 1000;
  TcpNetwork network(options);
  ReliableEndpoint sender(network.open("a"), worker_endpoint(0, 1), 1),
      receiver(network.open("b"), channel_endpoint(0, 0), 1);
  sender.connect(receiver.id(), receiver.address());
  Writer large(1000);
  large.skip(1000);
  CHECK_THROWS(Code::kArgument, sender.send(receiver.id(), Kind::kIntent, 1, large.finish()));
  sender.send(receiver.id(), Kind::kIntent, 2, Writer(0).finish());
  Header header;
  Message message;
  CHECK(receiver.receive(header, message, milliseconds(2000)) && header.count == 2);
}

TEST(a_new_worker_under_an_old_number_starts_a_new_stream) {
  MemoryNetwork network;
  ReliableEndpoint receiver(network.open("b"), channel_endpoint(0, 0), 1);
  Header header;
  Message message;
  for (std::uint32_t incarnation = 1; incarnation <= 3; ++incarnation) {
    ReliableEndpoint worker(network.open("a"), worker_endpoint(0, 1), incarnation);
    worker.connect(receiver.id(), receiver.address());
    worker.send(receiver.id(), Kind::kIntent, incarnation, Writer(0).finish());
    CHECK(receiver.receive(header, message, milliseconds(2000)) && header.count == incarnation);
    receiver.send(worker.id(), Kind::kReply, 7, Writer(0).finish());
    CHECK(worker.receive(header, message, milliseconds(2000)) && header.count == 7);
  }
}

// Bytes of all kinds at a channel's port: counted, and the node goes on.
TEST(hostile_messages_do_nothing) {
  auto network = std::make_shared<MemoryNetwork>();
  StoreSpec spec;
  spec.lengths = {4};
  spec.num_keys = 100;
  spec.num_nodes = 2;
  std::vector<std::shared_ptr<Store>> stores;
  std::vector<std::unique_ptr<NodeService>> services;
  ChannelAddresses addresses;
  for (spec.node = 0; spec.node < 2; ++spec.node) {
    stores.push_back(Store::create(spec));
    services.push_back(std::make_unique<NodeService>(stores.back(), network, ChannelOptions{}));
    addresses.push_back(services.back()->addresses()[0]);
  }
  for (const auto& service : services) service->start(addresses);
  auto attacker = network->open("attacker");
  attacker->connect(0, addresses[0]);
  std::mt19937_64 random(3);
  std::uint32_t sequence = 0;
  for (std::uint32_t i = 0; i < 3000; ++i) {
    const std::size_t size = random() % 200;
    Message message = Message::allocate(size);
    for (std::size_t j = 0; j < size; ++j) message.data()[j] = static_cast<std::byte>(random());
    if (i % 3 != 0 && size >= sizeof(Header)) {  // a good header, of a worker of node 1, around nonsense
      const bool right_version = i % 3 == 1;
      const Header header{kProtocolMagic | (right_version ? kProtocolVersion : 99),
                          worker_endpoint(1, 200),
                          1,
                          right_version ? sequence++ : 0,
                          static_cast<Kind>(random() % 14),
                          0,
                          static_cast<std::uint32_t>(random() % 5)};
      std::memcpy(message.data(), &header, sizeof header);
    }
    attacker->send(0, message);
  }
  Worker worker(stores[1], 0, network, addresses, WorkerOptions{milliseconds(20000), 1024}, nullptr);
  std::vector<std::int64_t> keys(100);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<std::int64_t>(i);
  std::vector<float> ones(400, 1), values(400);
  const auto access = [&](Op op, std::vector<float>& data) {
    worker.wait(worker.access(op, keys.data(), keys.size(), reinterpret_cast<std::byte*>(data.data()),
                              data.size() * sizeof(float), nullptr));
  };
  access(Op::kPush, ones);
  access(Op::kPull, values);
  CHECK(values == ones);
  for (int i = 0; i < 1000 && stores[0]->total(kProtocolErrors) < 1000; ++i)
    std::this_thread::sleep_for(milliseconds(10));
  CHECK(stores[0]->total(kProtocolErrors) > 1000);
}

TEST(keys_stay_found_while_others_are_evicted_for_them) {
  StoreSpec spec;
  spec.lengths = {1};
  spec.capacity = 24;
  const std::shared_ptr<Store> shared = Store::create(spec);
  Store& store = *shared;
  const std::uint32_t user = kMaxChannels;
  store.membership().join(user);
  std::mt19937_64 random(3);
  for (int turn = 0; turn < 20000; ++turn) {
    const auto key = static_cast<std::int64_t>(random() % 200);
    CHECK(store.index().find_or_make(user, key) == store.index().find(key));
  }
  CHECK(store.index().owned_keys().size() <= spec.capacity);
}

// A lock is taken from the dead only. Without a file descriptor left, /proc cannot say who is.
TEST(who_cannot_be_asked_is_alive) {
  const ProcessId mine = ProcessId::current();
  CHECK(alive(mine));
  CHECK(!alive({mine.pid, mine.start_ticks + 1}));
  rlimit limit{};
  CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  const rlimit none{0, limit.rlim_max};
  CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
  const bool found_alive = alive(mine);
  CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  CHECK(found_alive);
}
