// Ranks are threads: those of a host over one segment, hosts over TCP.
#include "group/host_collectives.h"

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "check.h"
#include "ports.h"

using namespace torchrelay;
using namespace torchrelay;

namespace {

constexpr std::chrono::seconds kLong{60};
constexpr std::size_t kSlotBytes = 8192;
constexpr std::size_t kPieceBytes = 4096, kInlineBytes = 64;
// Of elements: in the records, in one piece, in several.
constexpr std::size_t kCounts[] = {1, 2, 15, 16, 17, 500, 2048, 10007};

template <class Value>
std::byte* bytes(std::vector<Value>& data) {
  return reinterpret_cast<std::byte*>(data.data());
}

Block block(std::vector<float>& data) { return {bytes(data), data.size() * sizeof(float)}; }

std::vector<Block> blocks(std::vector<std::vector<float>>& data) {
  std::vector<Block> out;
  for (auto& each : data) out.push_back(block(each));
  return out;
}

const std::vector<std::vector<int>> kPlacements = {{2, 2}, {1, 1}, {2, 1, 3}, {1, 2}};

struct Group {
  explicit Group(const std::vector<int>& sizes) {
    MessengerOptions options;
    std::vector<testing::Port> listeners;
    for (const int size : sizes) {
      options.hosts.emplace_back();
      for (int i = 0; i < size; ++i) {
        const int rank = static_cast<int>(options.names.size());
        options.hosts.back().push_back(rank);
        options.names.push_back(rank);
        options.addresses.push_back(listeners.emplace_back().address);
      }
    }
    hosts = options.hosts;
    for (const auto& ranks : hosts) {
      const SharedMemory memory =
          SharedGroup::create({static_cast<int>(ranks.size()), kSlotBytes, 2048, 4096});
      for (std::size_t local = 0; local < ranks.size(); ++local) {
        shared.push_back(std::make_unique<SharedGroup>(SharedMemory::from_fd(memory.fd()),
                                                       static_cast<int>(local), ranks));
        options.rank = ranks[local];
        SharedGroup& here = *shared.back();
        messengers.push_back(std::make_unique<Messenger>(
            options, std::move(listeners[static_cast<std::size_t>(options.rank)].socket),
            Messenger::ReceiveLocally(),
            [&here](const Error& error) { here.report(error.code(), error.what(), error.ranks()); }));
      }
    }
  }

  // Runs a collective on all ranks but `absent`; returns what each throws.
  std::vector<std::string> run(
      const char* name, std::size_t share_bytes,
      const std::function<void(HostGroup&, const Operation&, std::size_t rank)>& call,
      std::chrono::nanoseconds timeout = kLong, int absent = -1) {
    std::vector<std::string> errors(shared.size());
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < shared.size(); ++rank) {
      if (static_cast<int>(rank) == absent) continue;
      threads.emplace_back([&, rank] {
        std::vector<int> names;
        for (std::size_t i = 0; i < shared.size(); ++i) names.push_back(static_cast<int>(i));
        HostGroup group(*shared[rank], *messengers[rank],
                        {static_cast<int>(rank), names, hosts, share_bytes, kPieceBytes, kInlineBytes});
        Operation operation;
        operation.name = name;
        operation.timeout = timeout;
        try {
          call(group, operation, rank);
        } catch (const Error& error) {
          errors[rank] = error.what();
        }
      });
    }
    for (auto& each : threads) each.join();
    return errors;
  }

  void run(const char* name,
           const std::function<void(HostGroup&, const Operation&, std::size_t rank)>& call) {
    for (const auto& error : run(name, 1024, call)) CHECK(error.empty());
  }

  std::vector<std::string> all_reduce(std::vector<std::vector<float>>& data, Op op, std::size_t share_bytes,
                                      std::chrono::nanoseconds timeout = kLong, int absent = -1) {
    return run(
        "all_reduce", share_bytes,
        [&](HostGroup& group, const Operation& operation, std::size_t rank) {
          torchrelay::all_reduce(group, operation, bytes(data[rank]), data[rank].size(), Dtype::kFloat32, op);
        },
        timeout, absent);
  }

  std::vector<std::vector<int>> hosts;
  std::vector<std::unique_ptr<SharedGroup>> shared;
  std::vector<std::unique_ptr<Messenger>> messengers;
};

std::vector<std::vector<float>> numbers(std::size_t ranks, std::size_t count) {
  std::vector<std::vector<float>> out(ranks, std::vector<float>(count));
  for (std::size_t rank = 0; rank < ranks; ++rank)
    for (std::size_t i = 0; i < count; ++i)
      out[rank][i] = static_cast<float>((i * 7 + rank * 13) % 101) + 0.25f * static_cast<float>(rank);
  return out;
}

}  // namespace

TEST(all_ranks_get_the_sum_whatever_the_hosts_and_the_size) {
  for (const auto& sizes : kPlacements) {
    Group group(sizes);
    const std::size_t ranks = group.shared.size();
    for (const std::size_t count : kCounts) {
      auto data = numbers(ranks, count);
      std::vector<float> expected(count, 0.0f);
      for (const auto& each : data)
        for (std::size_t i = 0; i < count; ++i) expected[i] += each[i];
      for (const auto& error : group.all_reduce(data, Op::kSum, 1024)) CHECK(error.empty());
      for (const auto& each : data) CHECK(each == expected);  // sums of few quarters are exact
    }
  }
}

std::vector<float> sum_of(const std::vector<std::vector<float>>& data) {
  std::vector<float> sum(data[0].size(), 0.0f);
  for (const auto& each : data)
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += each[i];
  return sum;
}

std::vector<std::vector<float>> normal_numbers(std::size_t ranks, std::size_t count) {
  std::mt19937 random(static_cast<unsigned>(count));
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> out(ranks, std::vector<float>(count));
  for (auto& each : out)
    for (float& value : each) value = normal(random);
  return out;
}

TEST(only_the_root_of_a_reduction_gets_the_sum) {
  for (const auto& sizes : kPlacements) {
    Group group(sizes);
    const std::size_t ranks = group.shared.size();
    for (const std::size_t count : kCounts)
      for (const std::size_t root : {std::size_t{0}, ranks - 1}) {
        const auto given = numbers(ranks, count);
        auto data = given;
        group.run("reduce", [&](HostGroup& on, const Operation& operation, std::size_t rank) {
          reduce(on, operation, bytes(data[rank]), count, Dtype::kFloat32, Op::kSum, static_cast<int>(root));
        });
        for (std::size_t rank = 0; rank < ranks; ++rank)
          CHECK(data[rank] == (rank == root ? sum_of(given) : given[rank]));
      }
  }
}

TEST(each_rank_gets_the_average_of_its_blocks) {
  for (const auto& sizes : kPlacements) {
    Group group(sizes);
    const std::size_t ranks = group.shared.size();
    for (const std::size_t count : kCounts) {
      auto data = numbers(ranks, count * ranks);
      auto expected = sum_of(data);
      for (float& each : expected) each /= static_cast<float>(ranks);
      std::vector<std::vector<float>> outputs(ranks, std::vector<float>(count));
      group.run("reduce_scatter", [&](HostGroup& on, const Operation& operation, std::size_t rank) {
        std::vector<std::byte*> inputs;
        for (std::size_t i = 0; i < ranks; ++i)
          inputs.push_back(bytes(data[rank]) + i * count * sizeof(float));
        reduce_scatter(on, operation, inputs, bytes(outputs[rank]), count, Dtype::kFloat32, Op::kAverage);
      });
      for (std::size_t rank = 0; rank < ranks; ++rank)
        CHECK(std::equal(outputs[rank].begin(), outputs[rank].end(),
                         expected.begin() + static_cast<std::ptrdiff_t>(rank * count)));
    }
  }
}

TEST(all_ranks_get_the_roots_data) {
  for (const auto& sizes : kPlacements) {
    Group group(sizes);
    const std::size_t ranks = group.shared.size();
    for (const std::size_t count : kCounts)
      for (const std::size_t root : {std::size_t{0}, ranks - 1}) {
        auto data = numbers(ranks, count);
        const auto expected = data[root];
        group.run("broadcast", [&](HostGroup& on, const Operation& operation, std::size_t rank) {
          broadcast(on, operation, block(data[rank]), 7, static_cast<int>(root));
        });
        for (const auto& each : data) CHECK(each == expected);
      }
  }
}

// Rank r's block has r parts more than rank 0's.
TEST(blocks_of_different_sizes_are_gathered_and_scattered) {
  for (const auto& sizes : kPlacements) {
    Group group(sizes);
    const std::size_t ranks = group.shared.size();
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{9}, std::size_t{3001}}) {
      auto data = numbers(ranks, count);
      for (std::size_t rank = 0; rank < ranks; ++rank) data[rank].resize(count * (rank + 1), 0.5f);
      std::vector<std::vector<float>> empty;
      for (const auto& each : data) empty.emplace_back(each.size(), -1.0f);
      std::vector<std::vector<std::vector<float>>> outputs(ranks, empty);
      group.run("all_gather", [&](HostGroup& on, const Operation& operation, std::size_t rank) {
        all_gather(on, operation, block(data[rank]), blocks(outputs[rank]), 7);
      });
      for (const auto& each : outputs) CHECK(each == data);
      const std::size_t root = ranks - 1;
      auto gathered = empty;
      group.run("gather", [&](HostGroup& on, const Operation& operation, std::size_t rank) {
        gather(on, operation, block(data[rank]), rank == root ? blocks(gathered) : std::vector<Block>{}, 7,
               static_cast<int>(root));
      });
      CHECK(gathered == data);
      auto scattered = empty;
      group.run("scatter", [&](HostGroup& on, const Operation& operation, std::size_t rank) {
        scatter(on, operation, rank == root ? blocks(gathered) : std::vector<Block>{}, block(scattered[rank]),
                7, static_cast<int>(root));
      });
      CHECK(scattered == data);
    }
  }
}

TEST(every_pair_of_ranks_exchanges_blocks) {
  for (const auto& sizes : kPlacements) {
    Group group(sizes);
    const std::size_t ranks = group.shared.size();
    for (const bool is_uniform : {true, false}) {
      std::vector<std::vector<std::vector<float>>> inputs(ranks), outputs(ranks);
      for (std::size_t from = 0; from < ranks; ++from)
        for (std::size_t to = 0; to < ranks; ++to) {
          const auto size = [&](std::size_t a, std::size_t b) { return is_uniform ? 700 : 900 * a + b; };
          inputs[from].emplace_back(size(from, to), static_cast<float>(10 * from + to));
          outputs[from].emplace_back(size(to, from));
        }
      group.run("all_to_all", [&](HostGroup& on, const Operation& operation, std::size_t rank) {
        all_to_all(on, operation, blocks(inputs[rank]), blocks(outputs[rank]), 7);
      });
      for (std::size_t from = 0; from < ranks; ++from)
        for (std::size_t to = 0; to < ranks; ++to) CHECK(outputs[to][from] == inputs[from][to]);
    }
  }
}

// The largest error of an encoded sum's element: a run of 256 elements that it may be part of has the largest
// sums of each host.
double bound_of(const std::vector<std::vector<float>>& data, const std::vector<std::vector<int>>& hosts,
                std::size_t at) {
  const std::size_t first = at < 255 ? 0 : at - 255, last = std::min(at + 256, data[0].size());
  double bound = 0.0;
  for (const auto& ranks : hosts) {
    double largest = 0.0;
    for (std::size_t i = first; i < last; ++i) {
      double sum = 0.0;
      for (const int rank : ranks) sum += data[static_cast<std::size_t>(rank)][i];
      largest = std::max(largest, std::fabs(sum));
    }
    bound += largest / 126.0;  // of the host's sum, and of its part of the total
  }
  return bound;
}

TEST(encoded_sums_are_the_same_on_all_ranks_and_what_they_lost_is_known) {
  for (const auto& sizes : kPlacements)
    for (const Compression compression : {Compression::kInt8, Compression::kBfloat16}) {
      Group group(sizes);
      const std::size_t ranks = group.shared.size();
      for (const std::size_t count : kCounts) {
        const auto given = normal_numbers(ranks, count);
        auto data = given;
        std::vector<std::vector<float>> lost(ranks, std::vector<float>(count));
        group.run("all_reduce", [&](HostGroup& on, const Operation& operation, std::size_t rank) {
          all_reduce(on, operation, bytes(data[rank]), count, Dtype::kFloat32, Op::kSum, nullptr, nullptr,
                     {compression, lost[rank].data()});
        });
        for (const auto& each : data) CHECK(each == data[0]);
        for (std::size_t i = 0; i < count; ++i) {
          double exact = 0.0, left = 0.0;
          for (std::size_t rank = 0; rank < ranks; ++rank) exact += given[rank][i], left += lost[rank][i];
          CHECK(std::fabs(data[0][i] - exact) <= bound_of(given, group.hosts, i));
          CHECK(std::fabs(data[0][i] + left - exact) <= 1e-5);
        }
        CHECK((data[0] == sum_of(given)) == (count * sizeof(float) <= kInlineBytes));
      }
    }
}

TEST(encoded_reductions_with_other_results) {
  for (const auto& sizes : kPlacements) {
    Group group(sizes);
    const std::size_t ranks = group.shared.size(), count = 3001;
    const auto given = normal_numbers(ranks, count * ranks);
    auto averages = given, on_root = given;
    std::vector<std::vector<float>> parts(ranks, std::vector<float>(count));
    group.run("mixed", [&](HostGroup& on, const Operation& operation, std::size_t rank) {
      all_reduce(on, operation, bytes(averages[rank]), count * ranks, Dtype::kFloat32, Op::kAverage, nullptr,
                 nullptr, {Compression::kInt8});
      reduce(on, operation, bytes(on_root[rank]), count * ranks, Dtype::kFloat32, Op::kSum, 1,
             Compression::kInt8);
      std::vector<std::byte*> inputs;
      auto own = given[rank];
      for (std::size_t i = 0; i < ranks; ++i) inputs.push_back(bytes(own) + i * count * sizeof(float));
      reduce_scatter(on, operation, inputs, bytes(parts[rank]), count, Dtype::kFloat32, Op::kSum,
                     Compression::kInt8);
    });
    const auto exact = sum_of(given);
    for (std::size_t i = 0; i < exact.size(); ++i) {
      const double bound = bound_of(given, group.hosts, i);
      CHECK(std::fabs(averages[0][i] * static_cast<float>(ranks) - exact[i]) <= bound);
      CHECK(std::fabs(on_root[1][i] - exact[i]) <= bound);
      CHECK(std::fabs(parts[i / count][i % count] - exact[i]) <= bound);
    }
    for (const auto& each : averages) CHECK(each == averages[0]);
    CHECK(averages[0] != exact && on_root[1] != exact && on_root[0] == given[0]);
  }
}

TEST(different_compressions_are_refused_on_all_ranks) {
  Group group({1, 1});
  auto data = numbers(2, 1000);
  const auto before = data;
  for (const auto& error :
       group.run("all_reduce", 1024, [&](HostGroup& on, const Operation& operation, std::size_t rank) {
         all_reduce(on, operation, bytes(data[rank]), 1000, Dtype::kFloat32, Op::kSum, nullptr, nullptr,
                    {rank == 0 ? Compression::kInt8 : Compression::kNone});
       }))
    CHECK(error.find("rank 0 made all_reduce of 1000 x float32, SUM, with compression int8; rank 1 made "
                     "all_reduce of 1000 x float32, SUM.") != std::string::npos);
  CHECK(data == before);
}

TEST(pieces_are_summed_in_the_network) {
  Group group({2, 1});
  auto data = numbers(3, 5000);
  const auto expected = sum_of(data);
  std::vector<float> network(5000);  // the leaders are ranks 0 and 2
  std::mutex lock;
  std::condition_variable changed;
  std::vector<int> arrived(5);
  group.run("all_reduce", [&](HostGroup& on, const Operation& operation, std::size_t rank) {
    std::deque<std::size_t> started;
    const NetworkSum sum{4000,
                         [&](std::size_t first, std::size_t count, std::chrono::nanoseconds) {
                           const std::lock_guard guard(lock);
                           for (std::size_t i = first; i < first + count; ++i) network[i] += data[rank][i];
                           ++arrived[first / 1000];
                           started.push_back(first);
                           changed.notify_all();
                         },
                         [&] {
                           std::unique_lock guard(lock);
                           const std::size_t first = started.front();
                           started.pop_front();
                           changed.wait(guard, [&] { return arrived[first / 1000] == 2; });
                           for (std::size_t i = first; i < first + 1000; ++i) data[rank][i] = network[i];
                         }};
    all_reduce(on, operation, bytes(data[rank]), 5000, Dtype::kFloat32, Op::kSum, nullptr, &sum);
  });
  for (const auto& each : data) CHECK(each == expected);
}

TEST(calls_and_sizes_that_differ_are_refused_on_all_ranks) {
  Group group({2, 1});
  auto data = numbers(3, 4);
  for (const auto& error :
       group.run("mixed", 1024, [&](HostGroup& on, const Operation& operation, std::size_t r) {
         if (r == 1)
           barrier(on, operation);
         else
           broadcast(on, operation, block(data[r]), 7, 2);
       }))
    CHECK(error.find("rank 1 made barrier; rank 2 made broadcast of 4 x float32, root 2") !=
          std::string::npos);
  std::vector<std::vector<float>> outputs(3, std::vector<float>(5));
  for (const auto& error :
       group.run("gather", 1024, [&](HostGroup& on, const Operation& operation, std::size_t r) {
         gather(on, operation, block(data[r]), r == 0 ? blocks(outputs) : std::vector<Block>{}, 7, 0);
       }))
    CHECK(error.find("rank 2 sends 16 bytes, but the tensors of the root, rank 0, have") !=
          std::string::npos);
  CHECK(!group.messengers[0]->failure().has_value());
}

TEST(other_reductions_and_share_sizes) {
  Group group({2, 2});
  for (const std::size_t share : {std::size_t{64}, std::size_t{4096}}) {
    auto data = numbers(4, 3001);
    std::vector<float> expected = data[0];
    for (const auto& each : data)
      for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = std::max(expected[i], each[i]);
    for (const auto& error : group.all_reduce(data, Op::kMax, share)) CHECK(error.empty());
    for (const auto& each : data) CHECK(each == expected);
  }
}

TEST(shares_that_do_not_fit_the_slots_are_refused) {
  Group group({2, 2});
  for (const std::size_t share : {std::size_t{0}, std::size_t{100}, kSlotBytes}) {
    auto data = numbers(4, 100);
    for (const auto& error : group.all_reduce(data, Op::kSum, share))
      CHECK(error.find("do not fit slots") != std::string::npos);
  }
}

TEST(a_rank_that_does_not_come_is_named_by_all) {
  Group group({1, 1, 1});
  auto data = numbers(3, 1000);
  const auto errors = group.all_reduce(data, Op::kSum, 1024, std::chrono::milliseconds(200), 2);
  for (const int rank : {0, 1}) {
    const std::string& error = errors[static_cast<std::size_t>(rank)];
    CHECK(error.find("rank 2 did not answer in time") != std::string::npos);
  }
  CHECK(group.messengers[0]->failure().has_value());
}
