// Ranks are threads over one segment.
#include "group/collectives.h"

#include <sched.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

#include "check.h"

using namespace torchrelay;

namespace {

using Body = std::function<void(SharedGroup&, const Operation&)>;

Operation operation(double timeout_s = 30) {
  Operation op;
  op.name = "test";
  op.timeout = std::chrono::nanoseconds(static_cast<std::int64_t>(timeout_s * 1e9));
  op.patience.yield = std::chrono::microseconds(20);
  return op;
}

// Runs body on `size` ranks and throws the first failure. The rings hold three slots, so that they come
// round.
void on_ranks(int size, const Body& body, std::size_t slot_bytes = 8192, std::size_t one_shot_bytes = 2048,
              std::size_t ring_bytes = 0) {
  const auto memory = SharedGroup::create({size, slot_bytes, one_shot_bytes, 4096, ring_bytes});
  std::vector<int> names;
  for (int r = 0; r < size; ++r) names.push_back(r);
  std::mutex lock;
  std::exception_ptr failure;
  std::vector<std::thread> ranks;
  for (int r = 0; r < size; ++r)
    ranks.emplace_back([&, r] {
      try {
        SharedGroup group(SharedMemory::from_fd(memory.fd()), r, names);
        group.join(operation());
        body(group, operation());
      } catch (...) {
        const std::lock_guard guard(lock);
        if (!failure) failure = std::current_exception();
      }
    });
  for (auto& rank : ranks) rank.join();
  if (failure) std::rethrow_exception(failure);
}

std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }

// What rank r holds at position i in round `seed`: any rank can tell.
std::int64_t value(std::uint32_t seed, int r, std::size_t i) {
  return static_cast<std::int64_t>((seed * 31 + static_cast<std::uint32_t>(r) * 17 + i * 7) % 1009);
}

void check_all_reduce(SharedGroup& group, const Operation& op, std::uint32_t seed, std::size_t count,
                      int root) {
  std::vector<std::int64_t> data(count);
  for (std::size_t i = 0; i < count; ++i) data[i] = value(seed, group.rank(), i);
  if (root < 0)
    all_reduce(group, op, bytes(data.data()), count, Dtype::kInt64, Op::kSum);
  else
    reduce(group, op, bytes(data.data()), count, Dtype::kInt64, Op::kSum, root);
  const bool has_result = root < 0 || root == group.rank();
  for (std::size_t i = 0; i < count; ++i) {
    std::int64_t sum = 0;
    for (int r = 0; r < group.size(); ++r) sum += value(seed, r, i);
    CHECK(data[i] == (has_result ? sum : value(seed, group.rank(), i)));
  }
  if (root >= 0) return;
  std::vector<std::int64_t> source(count), out(count, -1);
  for (std::size_t i = 0; i < count; ++i) source[i] = value(seed, group.rank(), i);
  const auto before = source;
  all_reduce(group, op, bytes(out.data()), count, Dtype::kInt64, Op::kSum, bytes(source.data()));
  CHECK(out == data);
  CHECK(source == before);
}

void check_reduce_scatter(SharedGroup& group, const Operation& op, std::uint32_t seed, std::size_t count) {
  const auto n = static_cast<std::size_t>(group.size());
  std::vector<std::int64_t> data(count * n), out(count);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = value(seed, group.rank(), i);
  std::vector<std::byte*> inputs;
  for (std::size_t r = 0; r < n; ++r) inputs.push_back(bytes(data.data() + r * count));
  reduce_scatter(group, op, inputs, bytes(out.data()), count, Dtype::kInt64, Op::kMax);
  for (std::size_t i = 0; i < count; ++i) {
    std::int64_t largest = 0;
    for (int r = 0; r < group.size(); ++r)
      largest = std::max(largest, value(seed, r, static_cast<std::size_t>(group.rank()) * count + i));
    CHECK(out[i] == largest);
  }
}

void check_broadcast(SharedGroup& group, const Operation& op, std::uint32_t seed, std::size_t count,
                     int root) {
  std::vector<std::int64_t> data(count);
  for (std::size_t i = 0; i < count; ++i) data[i] = value(seed, group.rank(), i);
  broadcast(group, op, {bytes(data.data()), count * 8}, 4, root);
  for (std::size_t i = 0; i < count; ++i) CHECK(data[i] == value(seed, root, i));
}

// Rank r contributes count + r elements.
void check_all_gather(SharedGroup& group, const Operation& op, std::uint32_t seed, std::size_t count,
                      int root) {
  const auto n = static_cast<std::size_t>(group.size());
  std::vector<std::int64_t> mine(count + static_cast<std::size_t>(group.rank()));
  for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = value(seed, group.rank(), i);
  std::vector<std::vector<std::int64_t>> all(n);
  std::vector<Block> outputs;
  for (std::size_t r = 0; r < n; ++r) {
    all[r].resize(count + r);
    outputs.push_back({bytes(all[r].data()), all[r].size() * 8});
  }
  if (root < 0)
    all_gather(group, op, {bytes(mine.data()), mine.size() * 8}, outputs, 4);
  else
    gather(group, op, {bytes(mine.data()), mine.size() * 8}, outputs, 4, root);
  if (root >= 0 && root != group.rank()) return;
  for (std::size_t r = 0; r < n; ++r)
    for (std::size_t i = 0; i < all[r].size(); ++i) CHECK(all[r][i] == value(seed, static_cast<int>(r), i));
}

// Rank r sends (count + 3r + 5t) elements to rank t; with a root only the root does.
void check_all_to_all(SharedGroup& group, const Operation& op, std::uint32_t seed, std::size_t count,
                      int root) {
  const auto n = static_cast<std::size_t>(group.size());
  const auto mine = static_cast<std::size_t>(group.rank());
  const auto size = [&](std::size_t from, std::size_t to) { return count + 3 * from + 5 * to; };
  std::vector<std::vector<std::int64_t>> in(n), out(n);
  std::vector<Block> inputs, outputs;
  for (std::size_t r = 0; r < n; ++r) {
    in[r].resize(size(mine, r));
    for (std::size_t i = 0; i < in[r].size(); ++i) in[r][i] = value(seed, group.rank(), i + r);
    out[r].resize(size(r, mine));
    inputs.push_back({bytes(in[r].data()), in[r].size() * 8});
    outputs.push_back({bytes(out[r].data()), out[r].size() * 8});
  }
  if (root < 0)
    all_to_all(group, op, inputs, outputs, 4);
  else
    scatter(group, op, inputs, outputs[static_cast<std::size_t>(root)], 4, root);
  for (std::size_t r = 0; r < n; ++r) {
    if (root >= 0 && static_cast<int>(r) != root) continue;
    for (std::size_t i = 0; i < out[r].size(); ++i)
      CHECK(out[r][i] == value(seed, static_cast<int>(r), i + mine));
  }
}

// The same choice on every rank, other delays on each.
void random_collectives(int size, int rounds, std::uint32_t seed) {
  on_ranks(size, [&](SharedGroup& group, const Operation& op) {
    std::mt19937 common(seed);
    std::mt19937 own(seed + 1000 + static_cast<std::uint32_t>(group.rank()));
    for (int round = 0; round < rounds; ++round) {
      const auto kind = static_cast<std::uint32_t>(common() % 9);
      const std::size_t count = common() % 4 == 0 ? common() % 5000 : common() % 300;
      const int root = static_cast<int>(common() % static_cast<std::uint32_t>(size));
      const auto mark = static_cast<std::uint32_t>(common());
      switch (own() % 8) {
        case 0: std::this_thread::sleep_for(std::chrono::microseconds(own() % 300)); break;
        case 1: std::this_thread::yield(); break;
        default: break;
      }
      switch (kind) {
        case 0: check_all_reduce(group, op, mark, count, -1); break;
        case 1: check_all_reduce(group, op, mark, count, root); break;
        case 2: check_reduce_scatter(group, op, mark, count); break;
        case 3: check_broadcast(group, op, mark, count, root); break;
        case 4: check_all_gather(group, op, mark, count, -1); break;
        case 5: check_all_gather(group, op, mark, count, root); break;
        case 6: check_all_to_all(group, op, mark, count, -1); break;
        case 7: check_all_to_all(group, op, mark, count, root); break;
        default: barrier(group, op); break;
      }
    }
  });
}

}  // namespace

TEST(sizes_from_nothing_to_many_blocks) {
  for (const int size : {1, 2, 3, 5})
    on_ranks(size, [](SharedGroup& group, const Operation& op) {
      std::uint32_t seed = 0;
      for (const std::size_t count : {0, 1, 7, 256, 257, 1023, 1024, 1025, 5000, 20000}) {
        check_all_reduce(group, op, ++seed, count, -1);
        check_all_reduce(group, op, ++seed, count, 0);
        check_reduce_scatter(group, op, ++seed, count);
        check_broadcast(group, op, ++seed, count, group.size() - 1);
        check_all_gather(group, op, ++seed, count, -1);
        check_all_to_all(group, op, ++seed, count, -1);
      }
    });
}

TEST(ten_thousand_random_collectives) {
  random_collectives(2, 5000, 1);
  random_collectives(3, 3000, 2);
  random_collectives(4, 2000, 3);
}

TEST(results_have_the_same_bits_on_all_ranks_and_every_time) {
  constexpr std::size_t kCount = 30000;
  std::vector<std::vector<float>> first;
  for (int run = 0; run < 3; ++run) {
    std::vector<std::vector<float>> results(4, std::vector<float>(kCount));
    on_ranks(4, [&](SharedGroup& group, const Operation& op) {
      std::mt19937 random(static_cast<std::uint32_t>(group.rank()));
      auto& data = results[static_cast<std::size_t>(group.rank())];
      for (float& x : data) x = static_cast<float>(random()) * 1e-5f;
      all_reduce(group, op, bytes(data.data()), kCount, Dtype::kFloat32, Op::kSum);
    });
    for (const auto& result : results) CHECK(result == results[0]);
    if (run == 0) first = results;
    CHECK(results == first);
  }
}

TEST(different_calls_fail_on_every_rank_and_the_group_goes_on) {
  on_ranks(3, [](SharedGroup& group, const Operation& op) {
    std::vector<float> data(100, 1.0f);
    const std::size_t count = group.rank() == 1 ? 99 : 100;
    CHECK_THROWS(Code::kMismatch,
                 all_reduce(group, op, bytes(data.data()), count, Dtype::kFloat32, Op::kSum));
    if (group.rank() == 0)
      CHECK_THROWS(Code::kMismatch, barrier(group, op));
    else
      CHECK_THROWS(Code::kMismatch, broadcast(group, op, {bytes(data.data()), 8}, 7, 2));
    std::vector<Block> blocks(3, Block{bytes(data.data()), 40});
    if (group.rank() == 2) blocks[0].size_bytes = 44;
    CHECK_THROWS(Code::kMismatch, all_to_all(group, op, blocks, blocks, 7));
    data.assign(100, 1.0f);
    all_reduce(group, op, bytes(data.data()), 100, Dtype::kFloat32, Op::kSum);
    CHECK(data[99] == 3.0f);
  });
}

TEST(the_difference_is_named) {
  on_ranks(2, [](SharedGroup& group, const Operation& op) {
    std::vector<float> data(4);
    try {
      all_reduce(group, op, bytes(data.data()), group.rank() == 0 ? 4 : 3, Dtype::kFloat32, Op::kSum);
      CHECK(false);
    } catch (const Error& error) {
      const std::string message = error.what();
      CHECK(message.find("rank 0 made all_reduce of 4 x float32, SUM") != std::string::npos);
      CHECK(message.find("rank 1 made all_reduce of 3 x float32, SUM") != std::string::npos);
    }
  });
}

TEST(a_late_rank_is_named_after_the_timeout) {
  on_ranks(3, [](SharedGroup& group, const Operation& op) {
    if (group.rank() == 2) {
      while (true) {
        try {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          group.look_after(op, 0);
        } catch (const Error& error) {
          CHECK(error.code() == Code::kTimeout || error.code() == Code::kPeerLost);
          return;
        }
      }
    }
    try {
      barrier(group, operation(0.2));
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.code() == Code::kTimeout);
      CHECK(error.ranks() == std::vector<int>{2});
    }
    CHECK_THROWS(Code::kTimeout, barrier(group, op));  // broken for good
  });
}

TEST(a_rank_that_left_is_named_at_once) {
  on_ranks(2, [](SharedGroup& group, const Operation& op) {
    barrier(group, op);
    if (group.rank() == 1) return;
    try {
      barrier(group, op);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.code() == Code::kPeerLost && error.ranks() == std::vector<int>{1});
      CHECK(op.elapsed_s() < 20);
    }
  });
}

TEST(a_poll_that_throws_stops_a_wait_and_the_others_hear) {
  on_ranks(2, [](SharedGroup& group, const Operation& op) {
    std::vector<float> data(4);
    if (group.rank() == 0) {
      Operation impatient = operation();
      impatient.poll = [] { throw Error(Code::kInterrupted, "enough"); };
      CHECK_THROWS(Code::kInterrupted, barrier(group, impatient));
    } else {
      while (true) {
        try {
          group.look_after(op, 0);
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        } catch (const Error& error) {
          CHECK(error.code() == Code::kPeerLost);
          break;
        }
      }
      CHECK_THROWS(Code::kPeerLost, barrier(group, op));
    }
  });
}

TEST(a_failure_outside_the_group_is_reported_to_all_ranks) {
  on_ranks(2, [](SharedGroup& group, const Operation& op) {
    if (group.rank() == 0) {
      group.check(op);
      group.report(Code::kTimeout, "rank 7 is cut off", {7, 9});
      group.report(Code::kPeerLost, "comes too late", {1});
    }
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        barrier(group, op);
        CHECK(false);
      } catch (const Error& error) {
        CHECK(error.code() == Code::kTimeout);
        CHECK(error.ranks() == std::vector<int>({7, 9}));
        CHECK(std::string(error.what()).find("rank 7 is cut off") != std::string::npos);
      }
    }
  });
}

// The ranks' threads inherit what the test may run on.
TEST(ranks_that_share_one_core_are_oversubscribed) {
  cpu_set_t before;
  CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
  int core = 0;
  while (!CPU_ISSET(core, &before)) ++core;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
  on_ranks(2, [](SharedGroup& group, const Operation&) { CHECK(group.oversubscribed()); });
  on_ranks(1, [](SharedGroup& group, const Operation&) { CHECK(!group.oversubscribed()); });
  CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
  const int cores = CPU_COUNT(&before);
  on_ranks(2,
           [cores](SharedGroup& group, const Operation&) { CHECK(group.oversubscribed() == (cores < 2)); });
}

TEST(ranks_that_do_not_sleep_leave_a_full_core) {
  cpu_set_t allowed;
  CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
  if (CPU_COUNT(&allowed) < 2) return;
  std::vector<int> two;
  for (int core = 0; two.size() < 2; ++core)
    if (CPU_ISSET(core, &allowed)) two.push_back(core);
  std::atomic<int> elsewhere{0};
  on_ranks(4, [&](SharedGroup& group, Operation op) {
    op.patience.yield = std::chrono::seconds(10);
    cpu_set_t only;
    CPU_ZERO(&only);
    const int start = two[group.rank() == 0 ? 1 : 0];
    CPU_SET(start, &only);
    CHECK(sched_setaffinity(0, sizeof only, &only) == 0);
    CHECK(sched_setaffinity(0, sizeof allowed, &allowed) == 0);
    for (int step = 0; step < 64; ++step) {
      group.synchronize(op);
      elsewhere += sched_getcpu() != start;
    }
  });
  CHECK(elsewhere > 0);
}

TEST(ranks_out_of_range_are_refused_before_anything_is_sent) {
  on_ranks(2, [](SharedGroup& group, const Operation& op) {
    float data[2] = {1, 2};
    const Block block{bytes(data), sizeof data};
    const std::vector<Block> one{block}, two{block, block};
    for (const int root : {-1, 2, 1 << 30}) {
      CHECK_THROWS(Code::kArgument, (broadcast(group, op, block, 0, root), 0));
      CHECK_THROWS(Code::kArgument, (reduce(group, op, bytes(data), 2, Dtype::kFloat32, Op::kSum, root), 0));
      CHECK_THROWS(Code::kArgument, (gather(group, op, block, two, 0, root), 0));
      CHECK_THROWS(Code::kArgument, (scatter(group, op, two, block, 0, root), 0));
    }
    const int own = group.rank();
    CHECK_THROWS(Code::kArgument, (gather(group, op, block, one, 0, own), 0));
    CHECK_THROWS(Code::kArgument, (scatter(group, op, one, block, 0, own), 0));
    CHECK_THROWS(Code::kArgument, (all_gather(group, op, block, one, 0), 0));
    CHECK_THROWS(Code::kArgument, (all_to_all(group, op, one, two, 0), 0));
    CHECK_THROWS(Code::kArgument, (all_to_all(group, op, two, one, 0), 0));
    CHECK_THROWS(Code::kArgument,
                 (reduce_scatter(group, op, {bytes(data)}, bytes(data), 1, Dtype::kFloat32, Op::kSum), 0));
    CHECK(data[0] == 1 && data[1] == 2);
    barrier(group, op);  // the group goes on
  });
}

TEST(wrong_shapes_are_refused) {
  CHECK_THROWS(Code::kArgument, SharedGroup::create({0, 8192, 0, 4096}));
  CHECK_THROWS(Code::kArgument, SharedGroup::create({2, 100, 0, 4096}));
  CHECK_THROWS(Code::kArgument, SharedGroup::create({2, 8192, 9000, 4096}));
  const auto memory = SharedGroup::create({2, 8192, 2048, 4096});
  CHECK_THROWS(Code::kArgument, SharedGroup(SharedMemory::from_fd(memory.fd()), 2, {0, 1}));
  const auto other = SharedMemory::create(1 << 16, "test");
  CHECK_THROWS(Code::kProtocol, SharedGroup(SharedMemory::from_fd(other.fd()), 0, {0, 1}));
}
