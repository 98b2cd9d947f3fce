// The switch's protocol without sockets and clocks: workers' streams and a table of slots over a simulated
// network, which loses, duplicates and holds back packets.
#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <random>
#include <type_traits>

#include "check.h"
#include "switch/kernels.h"
#include "switch/quantizer.h"
#include "switch/state.h"
#include "switch/stream.h"

using namespace torchrelay;
using namespace torchrelay::switchml;

namespace {

using Packet = std::vector<std::byte>;
using Packets = std::vector<Packet>;
template <class T>
using Arrays = std::vector<std::vector<T>>;  // of each worker

constexpr std::uint16_t kNumel = 64;
constexpr Microseconds kLimit{100'000'000'000};

// A stream that returns what it sends.
class Sender {
 public:
  Sender(std::uint32_t num_workers, std::uint16_t window, const RetryPolicy& retry)
      : stream({0, window, kNumel, num_workers, retry}) {}

  template <class T>
  Packets begin(std::vector<T>& values, std::uint8_t job, Microseconds now) {
    stream.begin(values.data(), values.size(), job, queue_, now);
    return take();
  }

  Packets receive(const Packet& datagram, Microseconds now) {
    stream.receive(datagram, queue_, now);
    return take();
  }

  Packets tick(Microseconds now) {
    stream.tick(queue_, now);
    return take();
  }

  Stream stream;

 private:
  Packets take() {
    Packets packets;
    for (std::size_t i = 0; i < queue_.size(); ++i) {
      const Bytes bytes = queue_.bytes().subspan(i * queue_.packet_bytes(), queue_.packet_bytes());
      packets.emplace_back(bytes.begin(), bytes.end());
    }
    queue_.clear();
    return packets;
  }

  PacketQueue queue_{packet_bytes(kNumel)};
};

Verdict apply(SlotTable& table, const Packet& datagram, std::uint32_t rank) {
  const auto header = parse(datagram);
  CHECK(header.has_value());
  return table.apply(*header, datagram.data() + kHeaderBytes, rank, 0);
}

Packet result(const SlotTable& table, const Packet& datagram) {
  Packet answer(packet_bytes(kNumel));
  table.result(parse(datagram).value(), answer.data());
  return answer;
}

// Delays have a long tail, which reorders packets and outlives timeouts.
class Simulation {
 public:
  Simulation(std::uint32_t num_workers, std::uint16_t window, double loss, double late, unsigned seed)
      : table_({num_workers, window, kNumel, true}), loss_(loss), late_(late), random_(seed) {
    for (std::uint32_t rank = 0; rank < num_workers; ++rank)
      senders_.emplace_back(num_workers, window, RetryPolicy{Microseconds{10'000}, 5, 5});
  }

  // Sums the workers' arrays in place. Packets of earlier jobs may still be on their way.
  template <class T>
  void run(Arrays<T>& arrays) {
    ++job_;
    std::vector<Microseconds> starts;
    for (std::size_t rank = 0; rank < arrays.size(); ++rank) starts.push_back(now_ + after(0.02 * draw()));
    std::vector<bool> begun(arrays.size());
    while (!std::ranges::all_of(begun, std::identity()) || !all_done()) {
      const auto [timer, rank] = next_timer(starts, begun);
      if (!events_.empty() && events_.top().due <= timer) {
        deliver(begun);
      } else if (now_ = timer; begun[rank]) {
        send(rank, senders_[rank].tick(now_));
      } else {
        begun[rank] = true;
        send(rank, senders_[rank].begin(arrays[rank], job_, now_));
      }
      CHECK(now_ < kLimit);
    }
  }

  const std::vector<std::size_t>& exact_chunks(std::size_t rank) const {
    return senders_[rank].stream.exact_chunks();
  }

 private:
  struct Event {
    Microseconds due;
    std::uint64_t order;
    bool to_switch;
    std::uint32_t rank;
    Packet datagram;
    bool operator>(const Event& other) const {
      return std::pair(due, order) > std::pair(other.due, other.order);
    }
  };

  static Microseconds after(double seconds) { return Microseconds{static_cast<std::int64_t>(1e6 * seconds)}; }
  double draw() { return std::uniform_real_distribution<>()(random_); }
  bool all_done() const {
    return std::ranges::all_of(senders_, [](const Sender& sender) { return sender.stream.done(); });
  }

  std::pair<Microseconds, std::uint32_t> next_timer(const std::vector<Microseconds>& starts,
                                                    const std::vector<bool>& begun) const {
    std::pair<Microseconds, std::uint32_t> next{Microseconds::max(), 0};
    for (std::uint32_t rank = 0; rank < senders_.size(); ++rank) {
      const Stream& stream = senders_[rank].stream;
      if (begun[rank] && stream.done()) continue;
      next = std::min(next, {begun[rank] ? stream.next_deadline() : starts[rank], rank});
    }
    return next;
  }

  void carry(bool to_switch, std::uint32_t rank, const Packet& datagram) {
    const int copies = draw() < 0.1 ? 2 : 1;
    for (int copy = 0; copy < copies; ++copy) {
      if (draw() < loss_) continue;
      double delay_s = 0.001 * (1 + draw());
      if (draw() < late_) delay_s *= std::pow(10, 2 * draw());
      events_.push({now_ + after(delay_s), order_++, to_switch, rank, datagram});
    }
  }

  void send(std::uint32_t rank, const Packets& packets) {
    for (const Packet& packet : packets) carry(true, rank, packet);
  }

  void deliver(const std::vector<bool>& begun) {
    const Event event = events_.top();
    events_.pop();
    now_ = event.due;
    if (!event.to_switch) {  // the socket of one that has not begun keeps nothing
      if (begun[event.rank]) send(event.rank, senders_[event.rank].receive(event.datagram, now_));
      return;
    }
    const Verdict verdict = apply(table_, event.datagram, event.rank);
    CHECK(verdict != Verdict::kRejected);
    for (std::uint32_t rank = 0; rank < senders_.size(); ++rank)
      if (verdict == Verdict::kMulticast || (verdict == Verdict::kUnicast && rank == event.rank))
        carry(false, rank, result(table_, event.datagram));
  }

  SlotTable table_;
  std::vector<Sender> senders_;
  double loss_, late_;
  std::mt19937 random_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::uint64_t order_ = 0;
  Microseconds now_{0};
  std::uint8_t job_ = 0;
};

void check_integers(Simulation& simulation, std::size_t workers, std::size_t size, std::mt19937& random) {
  Arrays<std::int32_t> arrays(workers, std::vector<std::int32_t>(size));
  std::vector<std::uint32_t> sums(size);
  for (auto& array : arrays)
    for (std::size_t i = 0; i < size; ++i)
      sums[i] += static_cast<std::uint32_t>(array[i] = static_cast<std::int32_t>(random()));
  simulation.run(arrays);
  for (const auto& array : arrays)
    for (std::size_t i = 0; i < size; ++i) CHECK(static_cast<std::uint32_t>(array[i]) == sums[i]);
}

// Compares with the exact sums within the error bound of quantizer.h.
void check_floats(Simulation& simulation, std::size_t workers, std::size_t size, std::mt19937& random) {
  Arrays<float> arrays(workers, std::vector<float>(size));
  std::vector<double> exact(size), largest((size + kNumel - 1) / kNumel);
  for (auto& array : arrays) {
    const double scale = std::pow(10, std::uniform_int_distribution(-44, 29)(random));
    for (std::size_t i = 0; i < size; ++i) {
      array[i] = static_cast<float>(scale * std::uniform_real_distribution<>(-1, 1)(random));
      exact[i] += double{array[i]};
      largest[i / kNumel] = std::max(largest[i / kNumel], std::abs(double{array[i]}));
    }
  }
  simulation.run(arrays);
  for (std::size_t i = 0; i < size; ++i) {
    int exponent = -126;
    if (largest[i / kNumel] > 0) exponent = std::max(std::ilogb(largest[i / kNumel]) + 1, exponent);
    const double quantization =
        std::ldexp(static_cast<double>(workers * workers), exponent - 32) * (1 + 1e-6);
    const float sum = std::abs(arrays[0][i]);
    const float next = std::nextafter(sum, std::numeric_limits<float>::infinity());
    const double rounding = (double{next} - double{sum}) / 2;
    CHECK(std::abs(double{arrays[0][i]} - exact[i]) <= quantization + rounding);
    for (const auto& array : arrays) CHECK(array[i] == arrays[0][i]);
  }
  for (std::size_t rank = 0; rank < workers; ++rank) CHECK(simulation.exact_chunks(rank).empty());
}

}  // namespace

TEST(every_sum_is_right_and_comes) {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    std::mt19937 random(seed);
    const auto one_of = [&](const auto& choices) { return choices[random() % choices.size()]; };
    const std::uint32_t workers = one_of(std::vector{1u, 2u, 3u, 5u});
    const std::uint16_t window = one_of(std::vector<std::uint16_t>{1, 2, 3, 5, 12});
    const double loss = one_of(std::vector{0.0, 0.02, 0.3}), late = one_of(std::vector{0.0, 0.05, 0.3});
    Simulation simulation(workers, window, loss, late, seed);
    const std::size_t jobs = 1 + random() % 2;
    for (std::size_t job = 0; job < jobs; ++job) {
      const std::size_t size = 1 + random() % (9 * kNumel);
      check_integers(simulation, workers, size, random);
      check_floats(simulation, workers, size, random);
    }
  }
}

TEST(more_workers_than_a_word_has_bits) {
  std::mt19937 random(1);
  Simulation simulation(65, 2, 0.01, 0.01, 1);
  check_integers(simulation, 65, 3 * kNumel, random);
}

TEST(a_chunk_that_cannot_be_quantized_is_left_alone_on_all_workers) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float special : {std::nanf(""), infinity, -infinity, std::ldexp(1.0f, 126), 3.4e38f}) {
    Simulation simulation(3, 2, 0.1, 0.1, 1);
    Arrays<float> arrays(3, std::vector<float>(5 * kNumel, 1.0f));
    arrays[1][3 * kNumel + 5] = special;
    simulation.run(arrays);
    for (std::size_t rank = 0; rank < 3; ++rank) {
      CHECK(simulation.exact_chunks(rank) == std::vector<std::size_t>{3});
      for (std::size_t i = 0; i < arrays[rank].size(); ++i) {
        if (rank == 1 && i == 3 * kNumel + 5)
          CHECK(arrays[rank][i] == special || std::isnan(special) == std::isnan(arrays[rank][i]));
        else
          CHECK(arrays[rank][i] == (i / kNumel == 3 ? 1.0f : 3.0f));
      }
    }
  }
}

TEST(the_timeout_doubles_after_a_growing_number_of_timeouts) {
  // Twice, then four times, then six times: losses of a long job alone do not make it slow.
  Sender sender(2, 1, {Microseconds{10'000}, 2, 2});
  std::vector<std::int32_t> values(kNumel);
  sender.begin(values, 0, Microseconds{0});
  std::vector<std::int64_t> waited_ms;
  for (Microseconds now{0}; waited_ms.size() < 13;) {
    waited_ms.push_back((sender.stream.next_deadline() - now).count() / 1000);
    now = sender.stream.next_deadline();
    CHECK(sender.tick(now).size() == 1);
  }
  CHECK(waited_ms == std::vector<std::int64_t>{10, 10, 20, 20, 20, 20, 40, 40, 40, 40, 40, 40, 80});
}

TEST(the_timeout_doubles_without_answers_and_halves_with_them) {
  std::vector<std::int32_t> values(10 * kNumel, 1);
  Sender sender(1, 1, {Microseconds{10'000}, 3, 100});
  SlotTable table({1, 1, kNumel, true});
  Microseconds now{0};
  const auto timeout_ms = [&] { return (sender.stream.next_deadline() - now).count() / 1000; };
  const auto answer = [&](const Packets& packets) {
    CHECK(packets.size() == 1);
    apply(table, packets[0], 0);
    return sender.receive(result(table, packets[0]), now);
  };
  Packets sent = sender.begin(values, 1, now);
  for (const int wanted_ms : {10, 10, 10, 20}) {
    CHECK(timeout_ms() == wanted_ms);
    now = sender.stream.next_deadline();
    CHECK(sender.tick(now) == sent);
  }
  // The answer may be to either of the packets: it says nothing about the network.
  sent = answer(sent);
  CHECK(timeout_ms() == 20);
  // This one is to a packet that was sent once.
  now += Microseconds{1'000};
  sent = answer(sent);
  CHECK(timeout_ms() == 10);
  while (!sent.empty()) sent = answer(sent);
  CHECK(sender.stream.done() && values == std::vector<std::int32_t>(10 * kNumel, 1));
}

TEST(a_packet_that_an_eighth_of_the_window_overtook_is_sent_again_once) {
  std::vector<std::int32_t> values(64 * kNumel, 1);
  Sender sender(1, 64, {Microseconds{1'000'000'000}, 100, 100});
  SlotTable table({1, 64, kNumel, true});
  const Packets packets = sender.begin(values, 1, Microseconds{0});
  for (std::size_t i = 0; i < 64; ++i) apply(table, packets[i], 0);
  for (std::size_t i = 1; i < 64; ++i) {
    const Packets again = sender.receive(result(table, packets[i]), Microseconds{1'000});
    CHECK(again == (i == 8 ? Packets{packets[0]} : Packets{}));  // the first sent 8 packets after packet 0
  }
  CHECK(!sender.stream.done());
  CHECK(sender.receive(result(table, packets[0]), Microseconds{2'000}).empty());
  CHECK(sender.stream.done());
}

TEST(two_packets_that_changed_places_are_not_sent_again) {
  std::vector<std::int32_t> values(8 * kNumel, 1);
  Sender sender(1, 8, {Microseconds{1'000'000'000}, 100, 100});
  SlotTable table({1, 8, kNumel, true});
  Packets packets = sender.begin(values, 1, Microseconds{0});
  for (const Packet& packet : packets) apply(table, packet, 0);
  std::swap(packets[0], packets[1]);
  for (const Packet& packet : packets)
    CHECK(sender.receive(result(table, packet), Microseconds{1'000}).empty());
}
