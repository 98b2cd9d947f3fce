// Ranks are threads: those of a host over one segment, hosts over TCP.
#include "torchrelay/transport/host_collectives.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <thread>

#include "check.h"

using namespace torchrelay;
using namespace torchrelay::transport;

namespace {

constexpr std::chrono::seconds kLong{60};
constexpr std::size_t kSlotBytes = 8192;

struct Group {
  explicit Group(const std::vector<int>& sizes) {
    MessengerOptions options;
    std::vector<Descriptor> listeners;
    for (const int size : sizes) {
      options.hosts.emplace_back();
      for (int i = 0; i < size; ++i) {
        const int rank = static_cast<int>(options.names.size());
        options.hosts.back().push_back(rank);
        options.names.push_back(rank);
        listeners.emplace_back(::socket(AF_INET, SOCK_STREAM, 0));
        sockaddr_in at{};
        at.sin_family = AF_INET;
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t length = sizeof at;
        const int fd = listeners.back().get();
        CHECK(bind(fd, reinterpret_cast<sockaddr*>(&at), length) == 0 && listen(fd, 16) == 0);
        getsockname(fd, reinterpret_cast<sockaddr*>(&at), &length);
        options.addresses.push_back({"127.0.0.1", ntohs(at.sin_port)});
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
            options, std::move(listeners[static_cast<std::size_t>(options.rank)]),
            [](Block, int, std::int32_t, std::uint8_t) -> std::shared_ptr<Transfer> { return nullptr; },
            [&here](const Error& error) { here.report(error.code(), error.what(), error.ranks()); }));
      }
    }
  }

  // Runs all ranks but `absent`; what each throws.
  std::vector<std::string> all_reduce(std::vector<std::vector<float>>& data, Op op, std::size_t share_bytes,
                                      std::chrono::nanoseconds timeout = kLong, int absent = -1) {
    std::vector<std::string> errors(data.size());
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < data.size(); ++rank) {
      if (static_cast<int>(rank) == absent) continue;
      threads.emplace_back([&, rank] {
        Operation operation;
        operation.name = "all_reduce";
        operation.timeout = timeout;
        try {
          transport::all_reduce(
              *shared[rank], *messengers[rank], {static_cast<int>(rank), hosts, share_bytes}, operation,
              reinterpret_cast<std::byte*>(data[rank].data()), data[rank].size(), Dtype::kFloat32, op);
        } catch (const Error& error) {
          errors[rank] = error.what();
        }
      });
    }
    for (auto& each : threads) each.join();
    return errors;
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
  const std::vector<std::vector<int>> placements = {{2, 2}, {1, 1}, {2, 1, 3}, {1, 2}};
  for (const auto& sizes : placements) {
    Group group(sizes);
    const std::size_t ranks = group.shared.size();
    for (const std::size_t count : {1u, 2u, 15u, 16u, 17u, 500u, 2048u, 10007u}) {
      auto data = numbers(ranks, count);
      std::vector<float> expected(count, 0.0f);
      for (const auto& each : data)
        for (std::size_t i = 0; i < count; ++i) expected[i] += each[i];
      for (const auto& error : group.all_reduce(data, Op::kSum, 1024)) CHECK(error.empty());
      for (const auto& each : data) CHECK(each == expected);  // sums of few quarters are exact
    }
  }
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
    auto data = numbers(4, 10);
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
