// The switch's protocol: packets, slots, quantization, and workers over real sockets.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <thread>

#include "check.h"
#include "core/dtype.h"
#include "switch/quantizer.h"
#include "switch/state.h"
#include "switch/stream.h"
#include "switch/udp_switch.h"
#include "switch/worker.h"

using namespace torchrelay;
using namespace torchrelay::switchml;

namespace {

using Packet = std::vector<std::byte>;

constexpr std::uint64_t kSession = 7;

Packet packet(const Header& header, std::int32_t value) {
  Packet bytes(packet_bytes(header.numel));
  serialize(header, bytes.data());
  const std::vector<std::int32_t> values(header.numel, value);
  kernels().store(bytes.data() + kHeaderBytes, values.data(), values.size());
  return bytes;
}

std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> all{&kernels("baseline")};
  if (&kernels() != all[0]) all.push_back(&kernels());
  return all;
}

std::vector<float> random_floats(std::size_t count, int exponent, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> values(count);
  for (float& value : values) value = std::ldexp(uniform(random), exponent);
  return values;
}

// A switch and workers on loopback, each worker with `threads` sockets.
class Cluster {
 public:
  Cluster(std::uint32_t num_workers, int threads, double drop)
      : switch_({"127.0.0.1", 0, drop, drop, 1}), num_workers_(num_workers) {
    switch_.open_session(kSession, {num_workers, 64, 64, true});
    for (std::uint32_t rank = 0; rank < num_workers; ++rank) {
      std::vector<int> sockets;
      for (int i = 0; i < threads; ++i) sockets.push_back(connected(rank));
      WorkerOptions options{"test", rank, num_workers, 64, 64, {Microseconds{2000}, 100, 100}, true};
      workers_.push_back(std::make_unique<Worker>(options, sockets));
    }
  }

  // Calls work(worker, rank) in a thread each.
  template <class Work>
  void run(Work work) {
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < num_workers_; ++rank)
      threads.emplace_back([&, rank] { work(*workers_[rank], rank); });
    for (std::thread& thread : threads) thread.join();
  }

  UdpSwitch& udp_switch() { return switch_; }
  Worker& worker(std::uint32_t rank) { return *workers_[rank]; }

 private:
  int connected(std::uint32_t rank) {
    const int fd = socket(AF_INET, SOCK_DGRAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    socklen_t size = sizeof address;
    CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0);
    switch_.add_worker(kSession, rank, {INADDR_LOOPBACK, ntohs(address.sin_port)}, 1);
    address.sin_port = htons(switch_.port());
    CHECK(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    return fd;
  }

  UdpSwitch switch_;
  std::uint32_t num_workers_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

const std::function<void()> kNoPoll = [] {};
constexpr Microseconds kPatient{300'000'000};

// One call per worker on values that differ by worker; checks all sums.
void check_sums(Cluster& cluster, std::uint32_t num_workers, std::size_t count, int exponent) {
  std::vector<std::vector<float>> floats;
  std::vector<std::vector<std::int32_t>> integers(num_workers, std::vector<std::int32_t>(count));
  std::vector<double> float_sums(count);
  std::vector<std::uint32_t> integer_sums(count);
  for (std::uint32_t rank = 0; rank < num_workers; ++rank) {
    floats.push_back(random_floats(count, exponent, rank + 1));
    for (std::size_t i = 0; i < count; ++i) {
      integers[rank][i] = static_cast<std::int32_t>(i * 2654435761u + rank);
      integer_sums[i] += static_cast<std::uint32_t>(integers[rank][i]);
      float_sums[i] += static_cast<double>(floats[rank][i]);
    }
  }
  cluster.run([&](Worker& worker, std::uint32_t rank) {
    worker.all_reduce(integers[rank].data(), count, Dtype::kInt32, kPatient, kNoPoll);
    worker.all_reduce(floats[rank].data(), count, Dtype::kFloat32, kPatient, kNoPoll);
  });
  const double bound =
      std::ldexp(num_workers * num_workers, exponent - 32) * 1.001 + std::ldexp(1, exponent - 20);
  for (std::uint32_t rank = 0; rank < num_workers; ++rank)
    for (std::size_t i = 0; i < count; ++i) {
      CHECK(static_cast<std::uint32_t>(integers[rank][i]) == integer_sums[i]);
      CHECK(std::abs(static_cast<double>(floats[rank][i]) - float_sums[i]) <= bound);
      CHECK(floats[rank][i] == floats[0][i]);
    }
}

}  // namespace

TEST(a_header_survives_the_wire_and_other_datagrams_are_refused) {
  const Header header{200, 0xDEADBEEF, 8191, 1, -77, 64, 5};
  Packet bytes = packet(header, 1);
  const auto parsed = parse(bytes);
  CHECK(parsed && parsed->job == 200 && parsed->tsi == 0xDEADBEEF && parsed->slot == 8191);
  CHECK(parsed->set == 1 && parsed->exponent == -77 && parsed->numel == 64);
  for (std::size_t size = 0; size < bytes.size(); ++size) CHECK(!parse({bytes.data(), size}));
  bytes.push_back({});
  CHECK(!parse(bytes));
  bytes.pop_back();
  for (int first = 0; first < 256; ++first) {
    bytes[0] = static_cast<std::byte>(first);
    CHECK(parse(bytes).has_value() == (first >> 4 == 1 && (first & 7) == 1));
  }
}

TEST(the_kernels_of_all_instruction_sets_agree) {
  const std::vector<float> values = random_floats(256, 3, 1);
  for (std::size_t count = 0; count <= 256; count += 37) {
    std::vector<std::vector<std::byte>> payloads;
    for (const Kernels* set : all_kernels()) {
      std::vector<std::byte> payload(257 * 4 + 1);
      set->quantize(payload.data() + 1, values.data(), count, quantization_scale(3, 3));
      std::vector<std::int32_t> integers(256);
      std::vector<std::byte> stored(257 * 4 + 1);
      set->load(integers.data(), payload.data() + 1, count);
      for (std::size_t i = 0; i < count; ++i)
        CHECK(integers[i] == std::lrint(static_cast<double>(values[i]) * quantization_scale(3, 3)));
      set->store(stored.data() + 1, integers.data(), count);
      CHECK(stored == payload);
      std::vector<float> back(256);
      set->dequantize(back.data(), payload.data() + 1, count, 1 / quantization_scale(3, 3));
      for (std::size_t i = 0; i < count; ++i) CHECK(std::abs(back[i] - values[i]) <= 1e-6f);
      set->add(integers.data(), payload.data() + 1, count);
      for (std::size_t i = 0; i < count; ++i)
        CHECK(integers[i] == 2 * std::lrint(static_cast<double>(values[i]) * quantization_scale(3, 3)));
      payloads.push_back(payload);
    }
    CHECK(payloads.front() == payloads.back());
  }
}

TEST(exponents_bound_their_chunk_and_mark_what_cannot_be_quantized) {
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(block_exponent(std::vector<float>{0, 0}.data(), 2) == -126);
  CHECK(block_exponent(std::vector<float>{1e-45f}.data(), 1) == -126);
  CHECK(block_exponent(std::vector<float>{-1.0f, 0.5f}.data(), 2) == 1);
  CHECK(block_exponent(std::vector<float>{std::ldexp(1.99f, 125)}.data(), 1) == 126);
  for (const float large : {std::ldexp(1.0f, 126), 3e38f, infinity, -infinity, std::nanf("")})
    CHECK(block_exponent(std::vector<float>{0, large}.data(), 2) == kNotQuantizable);
}

TEST(no_sum_of_quantized_values_overflows) {
  for (const std::uint32_t workers : {1u, 2u, 3u, 255u, 256u, 257u, 5000u})
    for (const int exponent : {-126, 0, 126}) {
      const double scale = quantization_scale(static_cast<std::int8_t>(exponent), workers);
      const float largest = std::nextafter(std::ldexp(1.0f, exponent), 0.0f);
      CHECK(std::isfinite(scale) && std::isfinite(1 / scale));
      CHECK(static_cast<double>(std::llrint(static_cast<double>(largest) * scale)) * workers <= 2147483647.0);
    }
}

TEST(a_sequenced_slot_ignores_what_is_older_than_its_newest_packet) {
  SlotTable table({2, 1, 64, true});
  const auto apply = [&](std::uint32_t rank, std::uint32_t tsi, std::uint8_t set, std::int32_t value) {
    const Header header{0, tsi, 0, set, 0, 64};
    return table.apply(header, packet(header, value).data() + kHeaderBytes, rank, 0);
  };
  CHECK(apply(0, 10, 0, 1) == Verdict::kConsumed);
  CHECK(apply(0, 10, 0, 1) == Verdict::kDuplicate);
  CHECK(apply(1, 10, 0, 1) == Verdict::kMulticast);
  CHECK(apply(0, 10, 0, 1) == Verdict::kUnicast);
  CHECK(apply(0, 11, 1, 1) == Verdict::kConsumed);
  CHECK(apply(0, 10, 0, 1) == Verdict::kStale);  // worker 1 is still in the set
  CHECK(apply(1, 11, 1, 1) == Verdict::kMulticast);
  CHECK(apply(0, 10, 0, 1) == Verdict::kStale);  // the set is empty
  CHECK(apply(0, 12, 0, 1) == Verdict::kConsumed);
  CHECK(apply(1, 10, 0, 1) == Verdict::kStale);  // the set is in use again
  CHECK(apply(1, 11, 1, 1) == Verdict::kUnicast);
  CHECK(table.missing() == std::vector<std::uint32_t>{1});
  CHECK(apply(1, 12, 0, 1) == Verdict::kMulticast);
  CHECK(table.missing().empty());
}

TEST(workers_sum_over_loopback_with_and_without_loss) {
  for (const std::uint32_t num_workers : {1u, 2u, 3u, 8u})
    for (const double drop : {0.0, 0.05}) {
      Cluster cluster(num_workers, 2, drop);
      for (const std::size_t count : {1u, 63u, 64u, 1000u, 20'001u})
        check_sums(cluster, num_workers, count, 5);
      const auto sessions = cluster.udp_switch().sessions();
      CHECK(sessions.size() == 1 && sessions[0].counts[kCompleted] > 0 &&
            sessions[0].workers.size() == num_workers);
      CHECK(cluster.udp_switch().stats()[kStrangers] == 0);
      CHECK((cluster.udp_switch().stats()[kDroppedEgress] > 0) == (drop > 0));
    }
}

TEST(values_that_cannot_be_quantized_come_out_as_ieee_754_says) {
  const float infinity = std::numeric_limits<float>::infinity();
  Cluster cluster(3, 2, 0.02);
  std::vector<std::vector<float>> values(3, std::vector<float>(2000, 0.25f));
  values[1][3] = std::nanf("");
  values[0][500] = infinity;
  values[2][501] = -infinity;
  values[0][502] = infinity, values[1][502] = -infinity;
  values[0][900] = 3e38f, values[1][900] = -3e38f;
  values[0][901] = 3e38f, values[1][901] = 3e38f;
  values[0][1999] = 2e38f;
  for (auto& worker : values)
    for (std::size_t i = 1280; i < 1400; ++i) worker[i] = std::ldexp(1.0f, -149);
  cluster.run([&](Worker& worker, std::uint32_t rank) {
    worker.all_reduce(values[rank].data(), 2000, Dtype::kFloat32, kPatient, kNoPoll);
  });
  for (const auto& sum : values) {
    CHECK(std::isnan(sum[3]) && sum[500] == infinity && sum[501] == -infinity && std::isnan(sum[502]));
    CHECK(sum[900] == 0.25f && sum[901] == infinity && sum[1999] == 2e38f && sum[0] == 0.75f);
    CHECK(sum[1350] == std::ldexp(3.0f, -149));
    CHECK(std::memcmp(sum.data(), values[0].data(), 2000 * sizeof(float)) == 0);
  }
  CHECK(cluster.worker(0).stats().exact_chunks > 0);
}

TEST(a_missing_worker_is_a_timeout_and_the_session_is_over) {
  Cluster cluster(2, 2, 0);
  std::vector<std::int32_t> values(1000, 1);
  const auto call = [&] {
    cluster.worker(0).all_reduce(values.data(), values.size(), Dtype::kInt32, Microseconds{50'000}, kNoPoll);
    return 0;
  };
  CHECK_THROWS(Code::kTimeout, call());
  CHECK(cluster.udp_switch().missing(kSession) == std::vector<std::uint32_t>{1});
  CHECK_THROWS(Code::kPeerLost, call());
}

TEST(a_switch_that_is_gone_and_an_interrupt_end_a_call) {
  auto cluster = std::make_unique<Cluster>(2, 1, 0);
  std::vector<float> values(1000, 1);
  std::atomic<int> polls{0};
  CHECK_THROWS(Code::kInterrupted,
               (cluster->worker(0).all_reduce(values.data(), values.size(), Dtype::kFloat32, kPatient,
                                              [&] {
                                                if (++polls == 2) throw Error(Code::kInterrupted, "stop");
                                              }),
                0));
  CHECK_THROWS(Code::kArgument,
               (cluster->worker(1).all_reduce(values.data(), 1, Dtype::kFloat64, kPatient, kNoPoll), 0));
  std::thread closing([&] { cluster->worker(1).close(); });
  closing.join();
  CHECK_THROWS(Code::kPeerLost,
               (cluster->worker(1).all_reduce(values.data(), 1, Dtype::kFloat32, kPatient, kNoPoll), 0));
}

TEST(closing_ends_a_call_also_before_its_threads_have_begun) {
  const int peer = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0);  // a switch that sends no results
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  CHECK(bind(peer, reinterpret_cast<sockaddr*>(&address), size) == 0);
  CHECK(getsockname(peer, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  for (int round = 0; round < 20; ++round) {
    std::vector<int> sockets;
    for (int i = 0; i < 32; ++i) {
      sockets.push_back(socket(AF_INET, SOCK_DGRAM, 0));
      CHECK(connect(sockets.back(), reinterpret_cast<sockaddr*>(&address), size) == 0);
    }
    Worker worker({"test", 0, 2, 64, 64, {}, true}, sockets);
    std::string error;
    std::atomic<bool> begun{false};
    std::thread calling([&] {
      std::vector<std::int32_t> values(64 * sockets.size());
      begun.store(true);
      try {
        worker.all_reduce(values.data(), values.size(), Dtype::kInt32, kPatient, kNoPoll);
      } catch (const Error& failure) {
        error = failure.what();
      }
    });
    while (!begun.load()) {
    }
    std::byte byte;
    while (round % 2 == 0 && recv(peer, &byte, 1, 0) < 0) {  // of the first thread
    }
    worker.close();
    calling.join();
    CHECK(error.find("the worker was closed") != error.npos);
    while (recv(peer, &byte, 1, 0) >= 0) {
    }
  }
  ::close(peer);
}

TEST(an_address_belongs_to_one_worker_of_one_session) {
  UdpSwitch udp({"127.0.0.1", 0, 0, 0, 0});
  udp.open_session(1, {2, 4, 64, false});
  udp.open_session(2, {2, 4, 64, false});
  const auto add = [&](std::uint64_t id, std::uint32_t rank, std::uint32_t ip, std::uint16_t port,
                       int count) {
    udp.add_worker(id, rank, {ip, port}, static_cast<std::uint16_t>(count));
    return 0;
  };
  add(1, 0, 100, 4000, 4);
  add(1, 0, 100, 4000, 4);
  add(2, 0, 100, 5000, 0);
  CHECK_THROWS(Code::kArgument, add(1, 1, 100, 4003, 1));
  CHECK_THROWS(Code::kArgument, add(2, 1, 100, 4003, 1));
  CHECK_THROWS(Code::kArgument, add(1, 1, 100, 0, 0));
  CHECK_THROWS(Code::kArgument, add(1, 0, 101, 4000, 1));
  CHECK_THROWS(Code::kArgument, add(1, 2, 102, 4000, 1));
  CHECK_THROWS(Code::kArgument, add(3, 0, 102, 4000, 1));
  CHECK_THROWS(Code::kUnavailable, UdpSwitch({"127.0.0.1", udp.port(), 0, 0, 0}).port());
  CHECK_THROWS(Code::kArgument, UdpSwitch({"switch", 0, 0, 0, 0}).port());
}
