// Ranks are threads: of one host, or two hosts of two ranks and one.
#include "group/group.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include "check.h"
#include "ports.h"

using namespace torchrelay;

namespace {

constexpr std::chrono::seconds kLong{60};
constexpr std::size_t kSlotBytes = 8192;

template <class Value>
Block block(std::vector<Value>& data) {
  return {reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(Value)};
}

Collective sum(std::vector<float>& data, Op op = Op::kSum) {
  return {Kind::kAllReduce, {}, {block(data)}, static_cast<std::uint8_t>(Dtype::kFloat32), op};
}

struct Ranks {
  explicit Ranks(const std::vector<std::vector<int>>& hosts, std::function<void()> interrupts = {}) {
    for (const auto& ranks : hosts) {
      const auto memory = SharedGroup::create({static_cast<int>(ranks.size()), kSlotBytes, 2048, 4096});
      for (std::size_t i = 0; i < ranks.size(); ++i)
        groups.push_back(std::make_unique<Group>(SharedMemory::from_fd(memory.fd()), static_cast<int>(i),
                                                 ranks, Group::Waiting{{}, {}, interrupts}));
    }
    on_all([](Group& group, std::size_t) { group.join(kLong); });
    if (hosts.size() > 1) connect(hosts);
  }

  void connect(const std::vector<std::vector<int>>& hosts) {
    MessengerOptions options;
    options.hosts = hosts;
    std::vector<testing::Port> listeners(groups.size());
    for (std::size_t rank = 0; rank < groups.size(); ++rank) {
      options.names.push_back(static_cast<int>(rank));
      options.addresses.push_back(listeners[rank].address);
    }
    for (std::size_t rank = 0; rank < groups.size(); ++rank) {
      options.rank = static_cast<int>(rank);
      groups[rank]->connect(options, std::move(listeners[rank].socket),
                            {options.rank, options.names, hosts, 1024, 4096, 64}, {});
    }
  }

  // Returns what each rank throws.
  std::vector<std::string> on_all(const std::function<void(Group&, std::size_t rank)>& body) {
    std::vector<std::string> errors(groups.size());
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < groups.size(); ++rank)
      threads.emplace_back([&, rank] {
        try {
          body(*groups[rank], rank);
        } catch (const Error& error) {
          errors[rank] = error.what();
        }
      });
    for (auto& thread : threads) thread.join();
    return errors;
  }

  std::vector<std::unique_ptr<Group>> groups;
};

const std::vector<std::vector<std::vector<int>>> kPlacements = {{{0, 1}}, {{0, 1}, {2}}};

}  // namespace

TEST(calls_made_as_one_are_compared_before_any_begins) {
  for (const auto& hosts : kPlacements) {
    Ranks ranks(hosts);
    const std::size_t odd = ranks.groups.size() - 1;
    for (const auto& error : ranks.on_all([odd](Group& group, std::size_t rank) {
           std::vector<float> a(5, 1.0f), b(rank == odd ? 4000 : 3000, 1.0f);
           const std::vector<Collective> calls = {sum(a), sum(b)};
           try {
             group.run(calls, kLong, true);
           } catch (const Error&) {
             if (a != std::vector<float>(5, 1.0f)) return;  // which the check below finds
             throw;
           }
         }))
      CHECK(error.find("2 coalesced calls") != std::string::npos);
    for (const auto& error : ranks.on_all([](Group& group, std::size_t) {
           std::vector<float> a(5, 1.0f), b(3000, 2.0f);
           const std::vector<Collective> calls = {sum(a), sum(b)};
           group.run(calls, kLong, true);
           group.run(calls, kLong, false)->wait(kLong, {});
         }))
      CHECK(error.empty());
    CHECK(ranks.groups[0]->calls() == 3);
    CHECK(ranks.groups[0]->payload_bytes() == 9015 * sizeof(float));
  }
}

TEST(what_has_the_same_bytes_is_another_call) {
  for (const auto& hosts : kPlacements) {
    Ranks ranks(hosts);
    const auto differ = [&](Collective mine, Collective theirs) {
      for (const auto& error : ranks.on_all([&](Group& group, std::size_t rank) {
             std::vector<float> data(6, 1.0f);
             Collective call = rank == 0 ? mine : theirs;
             call.outputs = {block(data)};
             group.run({&call, 1}, kLong, true);
           }))
        if (error.find("different calls") == std::string::npos) return false;
      return true;
    };
    const auto of = [](Dtype dtype, Op op) {
      return Collective{Kind::kAllReduce, {}, {}, static_cast<std::uint8_t>(dtype), op};
    };
    CHECK(differ(of(Dtype::kFloat32, Op::kSum), of(Dtype::kFloat32, Op::kPremulSum)));
    CHECK(differ(of(Dtype::kFloat32, Op::kSum), of(Dtype::kComplex64, Op::kSum)));
    CHECK(differ(of(Dtype::kBool, Op::kOr), of(Dtype::kUint8, Op::kOr)));
    CHECK(differ(of(Dtype::kBool, Op::kOr), of(Dtype::kBool, Op::kMax)));
    CHECK(!differ(of(Dtype::kBool, Op::kOr), of(Dtype::kBool, Op::kOr)));
  }
}

TEST(wrong_calls_are_refused_on_their_rank) {
  Ranks ranks({{0, 1}});
  std::vector<float> data(2);
  const std::vector<Collective> wrong = {
      {Kind::kAllReduce},
      {Kind::kBroadcast, {}, {}, 0, Op::kSum, 0},
      {Kind::kAllGather, {}, {block(data), block(data)}},
      {Kind::kAllGather, {block(data)}, {block(data)}},
      {Kind::kReduce, {}, {block(data)}, static_cast<std::uint8_t>(Dtype::kFloat32), Op::kSum, 2},
      sum(data, Op::kXor),
  };
  for (const auto& call : wrong) CHECK_THROWS(Code::kArgument, ranks.groups[0]->run({&call, 1}, kLong, true));
}

TEST(an_interrupted_caller_breaks_the_group) {
  for (const auto& hosts : kPlacements) {
    std::atomic<bool> interrupts{false};
    Ranks ranks(hosts, [&] {
      if (interrupts) throw Error(Code::kInterrupted, "by a test");
    });
    interrupts = true;
    std::vector<float> queued(10), data(10);
    const Collective first = sum(queued), second = sum(data);
    const auto ticket = ranks.groups[0]->run({&first, 1}, kLong, false);
    // It waits behind the one that was queued.
    CHECK_THROWS(Code::kInterrupted, ranks.groups[0]->run({&second, 1}, kLong, true));
    CHECK_THROWS(Code::kPeerLost, ticket->wait(kLong, {}));
    CHECK_THROWS(Code::kPeerLost, ranks.groups[0]->run({&second, 1}, kLong, true));
  }
}

TEST(messages_within_a_host_match_those_from_others) {
  Ranks ranks({{0, 1}, {2}});
  for (const auto& error : ranks.on_all([](Group& group, std::size_t rank) {
         for (const std::size_t count : {1, 20'000}) {
           std::vector<float> data(count, static_cast<float>(rank));
           if (rank == 1) {
             float total = 0;
             for (int i = 0; i < 2; ++i) {
               const auto transfer = group.receive(block(data), kAnyRank, 7, 1, kLong);
               CHECK(group.wait(transfer, kLong));
               CHECK(data.back() == static_cast<float>(transfer->source()));
               total += data.back();
             }
             CHECK(total == 2.0f);
           } else {
             const auto transfer = group.send(block(data), 1, 7, 1, kLong);
             CHECK(group.wait(transfer, kLong));
           }
           const Collective barrier;
           group.run({&barrier, 1}, kLong, true);
         }
       }))
    CHECK(error.empty());
}

TEST(a_forked_child_is_refused) {
  for (const auto& hosts : kPlacements) {
    Ranks ranks(hosts);
    const pid_t child = fork();
    if (child == 0) {
      int refused = 0;
      const Collective barrier;
      try {
        ranks.groups[0]->run({&barrier, 1}, kLong, true);
      } catch (const Error& error) {
        refused += error.code() == Code::kUnavailable;
      }
      try {
        ranks.groups[0]->send({}, 1, 0, 0, kLong);
      } catch (const Error& error) {
        refused += error.code() == Code::kUnavailable;
      }
      ranks.groups[0]->close();
      _exit(refused == 2 ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    for (const auto& error : ranks.on_all([](Group& group, std::size_t) {
           const Collective barrier;
           group.run({&barrier, 1}, kLong, true);
         }))
      CHECK(error.empty());
  }
}
