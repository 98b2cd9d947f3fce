// Ranks are threads over one segment.
#include "group/mailboxes.h"

#include <atomic>
#include <numeric>
#include <random>
#include <thread>

#include "check.h"

using namespace torchrelay;

namespace {

constexpr std::chrono::seconds kLong{30};
constexpr std::size_t kEndless = std::size_t{1} << 63;  // more than any memory holds

struct Rank {
  Rank(const SharedMemory& memory, int rank, std::vector<int> names)
      : group(SharedMemory::from_fd(memory.fd()), rank, std::move(names)), mail(group) {}

  std::shared_ptr<Transfer> send(std::vector<int>& data, int to, std::int64_t tag = 0,
                                 std::chrono::nanoseconds limit = kLong) {
    return mail.send(block(data), to, tag, 3, limit);
  }
  std::shared_ptr<Transfer> receive(std::vector<int>& data, int from, std::int64_t tag = 0,
                                    std::chrono::nanoseconds limit = kLong) {
    return mail.receive(block(data), from, tag, 3, limit);
  }
  void wait(const std::shared_ptr<Transfer>& transfer) { CHECK(mail.wait(*transfer, kLong, {}, {})); }

  static Block block(std::vector<int>& data) {
    return {reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(int)};
  }

  SharedGroup group;
  Mailboxes mail;
};

struct World {
  explicit World(int size) : memory(SharedGroup::create({size, 8192, 2048, 4096})) {
    std::vector<int> names(static_cast<std::size_t>(size));
    std::iota(names.begin(), names.end(), 0);
    for (int r = 0; r < size; ++r) ranks.push_back(std::make_unique<Rank>(memory, r, names));
  }
  Rank& operator[](int r) { return *ranks[static_cast<std::size_t>(r)]; }

  SharedMemory memory;
  std::vector<std::unique_ptr<Rank>> ranks;
};

std::vector<int> numbers(int first, std::size_t count) {
  std::vector<int> out(count);
  std::iota(out.begin(), out.end(), first);
  return out;
}

}  // namespace

TEST(a_small_message_is_sent_without_waiting) {
  World world(2);
  auto out = numbers(5, 100);
  const auto sent = world[0].send(out, 1);
  CHECK(sent->ticket().done());
  std::vector<int> in(100);
  const auto received = world[1].receive(in, 0);
  CHECK(received->ticket().done() && received->source() == 0 && in == out);
}

TEST(a_message_larger_than_the_ring_flows_with_nobody_waiting) {
  World world(2);
  auto out = numbers(1, 100000);
  std::vector<int> in(out.size());
  const auto sent = world[0].send(out, 1);
  CHECK(!sent->ticket().done());
  const auto received = world[1].receive(in, 0);
  CHECK(received->ticket().wait(kLong, {}) && sent->ticket().wait(kLong, {}));
  CHECK(in == out);
}

TEST(tags_and_sources_choose_messages) {
  World world(3);
  auto a = numbers(10, 4), b = numbers(20, 4), c = numbers(30, 4), nothing = numbers(0, 0);
  for (const auto& t :
       {world[0].send(a, 2, 1), world[0].send(b, 2, 2), world[1].send(c, 2, 1), world[1].send(nothing, 2, 9)})
    CHECK(t->ticket().done());
  std::vector<int> in_b(4), in_c(4), in_a(4), empty;
  world[2].wait(world[2].receive(in_b, 0, 2));  // behind a, which is put scratch
  CHECK(in_b == b);
  world[2].wait(world[2].receive(in_c, 1, 1));
  CHECK(in_c == c);
  const auto any = world[2].receive(in_a, -1, 1);
  world[2].wait(any);
  CHECK(in_a == a && any->source() == 0);
  world[2].wait(world[2].receive(empty, 1, 9));
}

TEST(any_tag_of_a_channel_is_taken_and_what_does_not_fit_says_what_it_was) {
  constexpr std::int64_t kChannel = std::int64_t{7} << 32;
  World world(2);
  auto other = numbers(10, 4), ours = numbers(20, 4), shorter = numbers(30, 2);
  world[0].send(other, 1, 5);
  world[0].send(ours, 1, kChannel + 5);
  world[0].send(shorter, 1, kChannel + 6);
  std::vector<int> in(4), rest(4);
  const auto found = world[1].receive(in, kAnyRank, kAnyTag + 7);
  world[1].wait(found);
  CHECK(in == ours && found->tag() == kChannel + 5 && found->size_bytes() == 4 * sizeof(int));
  const auto refused = world[1].receive(rest, kAnyRank, kAnyTag + 7);
  CHECK_THROWS(Code::kMismatch, world[1].wait(refused));
  CHECK(refused->source() == 0 && refused->tag() == kChannel + 6 && refused->size_bytes() == 2 * sizeof(int));
  world[1].wait(world[1].receive(in, 0, 5));
  CHECK(in == other);
}

TEST(a_wait_without_time_moves_what_is_there) {
  World world(2);
  auto out = numbers(1, 2000);  // more than the ring holds
  std::vector<int> in(out.size());
  const auto received = world[1].receive(in, 0);
  CHECK(!world[1].mail.wait(*received, {}, {}, {}));
  const auto sent = world[0].send(out, 1);
  while (!world[1].mail.wait(*received, {}, {}, {})) world[0].mail.wait(*sent, {}, {}, {});
  CHECK(in == out);
}

TEST(many_messages_both_ways_at_once) {
  World world(3);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int r = 0; r < 3; ++r)
    threads.emplace_back([&, r] {
      std::mt19937 random(static_cast<std::uint32_t>(r));
      std::vector<std::vector<int>> out, in;
      std::vector<std::shared_ptr<Transfer>> transfers;
      out.reserve(1000);
      in.reserve(1000);
      for (int i = 0; i < 300; ++i)
        for (int peer = 0; peer < 3; ++peer) {
          if (peer == r) continue;
          const auto count = static_cast<std::size_t>((i * 37) % 2000);
          out.push_back(numbers(r * 1000 + i, count));
          in.emplace_back(count);
          transfers.push_back(world[r].send(out.back(), peer, i % 5));
          transfers.push_back(world[r].receive(in.back(), peer, i % 5));
          if (random() % 16 == 0) std::this_thread::yield();
        }
      for (const auto& t : transfers) world[r].wait(t);
      std::size_t k = 0;
      for (int i = 0; i < 300; ++i)
        for (int peer = 0; peer < 3; ++peer) {
          if (peer == r) continue;
          if (in[k] != numbers(peer * 1000 + i, in[k].size())) ++wrong;
          ++k;
        }
    });
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST(large_messages_of_any_size_both_ways_at_once) {
  World world(2);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      // Around a part of the ring, the ring, and many rings, and a last byte that no ring's size divides.
      for (const std::size_t size : {1u, 495u, 496u, 497u, 3967u, 3968u, 3969u, 8191u, 100003u, 1000001u}) {
        const auto pattern = [&](int from) {
          std::vector<std::byte> bytes(size);
          for (std::size_t i = 0; i < size; ++i)
            bytes[i] = static_cast<std::byte>(i * 31 + i / 251 + static_cast<std::size_t>(from) * 7 + size);
          return bytes;
        };
        auto out = pattern(r);
        std::vector<std::byte> in(size), again(size);
        Mailboxes& mail = world[r].mail;
        const auto sent = mail.send({out.data(), size}, 1 - r, 0, 3, kLong);
        const auto first = mail.receive({in.data(), size}, 1 - r, 0, 3, kLong);
        const auto small = mail.send({out.data(), 1}, 1 - r, 1, 3, kLong);
        const auto behind = mail.receive({again.data(), 1}, 1 - r, 1, 3, kLong);
        for (const auto& t : {behind, first, sent, small}) world[r].wait(t);
        const auto expected = pattern(1 - r);
        if (in != expected || again[0] != expected[0]) ++wrong;
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST(a_peer_is_lost_in_the_middle_of_a_message) {
  World world(2);
  auto out = numbers(1, 100000);
  std::vector<int> in(out.size());
  const auto half = world[0].send(out, 1);  // as much as the ring holds, because nobody receives it yet
  world.ranks[0].reset();
  CHECK_THROWS(Code::kPeerLost, half->ticket().wait(kLong, {}));
  const auto received = world[1].receive(in, 0);
  try {
    (void)world[1].mail.wait(*received, kLong, {}, {});
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.code() == Code::kPeerLost && error.ranks() == std::vector<int>{0});
  }
  CHECK(in[0] == 1 && in.back() == 0);
}

TEST(a_wrong_size_fails_the_receive_and_nothing_else) {
  World world(2);
  auto three = numbers(1, 3), four = numbers(1, 4);
  (void)world[0].send(three, 1);
  (void)world[0].send(four, 1);
  std::vector<int> in(4);
  const auto bad = world[1].receive(in, 0);
  CHECK_THROWS(Code::kMismatch, world[1].mail.wait(*bad, kLong, {}, {}));
  world[1].wait(world[1].receive(in, 0));
  CHECK(in == four);
}

TEST(a_large_message_of_a_wrong_size_is_dropped_with_nobody_waiting) {
  World world(2);
  auto out = numbers(1, 100000);
  std::vector<int> in(4);
  const auto bad = world[1].receive(in, 0);
  const auto sent = world[0].send(out, 1);
  CHECK_THROWS(Code::kMismatch, bad->ticket().wait(kLong, {}));
  CHECK(sent->ticket().wait(kLong, {}));
}

// Of such a message the ranks exchange only what a ring holds.
TEST(no_memory_is_needed_for_what_never_comes_or_is_dropped) {
  for (const bool fits : {false, true}) {
    World world(2);
    std::vector<std::byte> out(8192), in(8192);
    (void)world[0].mail.send({out.data(), kEndless}, 1, 0, 3, kLong);
    world.ranks[0].reset();
    const auto received = world[1].mail.receive({in.data(), fits ? kEndless : 4}, 0, 0, 3, kLong);
    CHECK_THROWS(fits ? Code::kPeerLost : Code::kMismatch, world[1].mail.wait(*received, kLong, {}, {}));
  }
}

TEST(a_message_that_no_memory_holds_fails_the_group) {
  World world(2);
  std::vector<std::byte> out(8192);
  std::vector<int> in(4);
  const auto sent = world[0].mail.send({out.data(), kEndless}, 1, 0, 3, kLong);
  const auto behind = world[1].receive(in, 0, 1);
  CHECK_THROWS(Code::kUnavailable, behind->ticket().wait(kLong, {}));
  CHECK_THROWS(Code::kUnavailable, sent->ticket().wait(kLong, {}));
  CHECK_THROWS(Code::kUnavailable, world[1].send(in, 0));
}

TEST(peers_out_of_range_are_refused) {
  World world(2);
  std::vector<int> data(4);
  for (const int peer : {-2, 2, 1 << 30}) {
    CHECK_THROWS(Code::kArgument, world[0].send(data, peer));
    CHECK_THROWS(Code::kArgument, world[0].receive(data, peer));
  }
  CHECK_THROWS(Code::kArgument, world[0].send(data, kAnyRank));
  CHECK_THROWS(Code::kArgument, world[0].send(data, 1, -1));
  CHECK_THROWS(Code::kArgument, world[0].receive(data, 1, -1));
}

TEST(nobody_sends) {
  World world(2);
  std::vector<int> in(4);
  const auto lonely = world[1].receive(in, 0, 0, std::chrono::milliseconds(100));
  CHECK_THROWS(Code::kTimeout, world[1].mail.wait(*lonely, kLong, {}, {}));
  auto out = numbers(3, 4);  // the group is not broken
  (void)world[0].send(out, 1);
  world[1].wait(world[1].receive(in, 0));
}

TEST(an_announced_message_that_is_late_breaks_the_group) {
  World world(2);
  std::vector<int> in(4);
  const auto announced = world[1].mail.receive(Rank::block(in), 0, 0, 3, std::chrono::milliseconds(20), true);
  CHECK_THROWS(Code::kTimeout, announced->ticket().wait(kLong, {}));
  CHECK_THROWS(Code::kTimeout, world[1].send(in, 0));
}

TEST(timeouts_and_losses_are_seen_while_other_messages_arrive) {
  World world(3);
  std::atomic<bool> ended{false};
  const std::jthread traffic([&](const std::stop_token& stop) {
    auto out = numbers(1, 10);
    const auto end = std::chrono::steady_clock::now() + kLong;
    try {
      while (!stop.stop_requested() && std::chrono::steady_clock::now() < end) {
        (void)world[0].send(out, 2);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    } catch (const Error&) {  // the group failed
    }
    ended = true;
  });
  std::vector<int> in(10), other(10);
  const auto lonely = world[2].receive(in, 0, 1), lost = world[2].receive(other, 1);
  CHECK(!world[2].mail.wait(*lonely, std::chrono::milliseconds(10), {}, {}));
  CHECK(!ended);
  world.ranks[1].reset();
  CHECK_THROWS(Code::kPeerLost, lost->ticket().wait(kLong, {}));
}

TEST(what_a_rank_sent_before_it_left_arrives) {
  World world(2);
  auto first = numbers(1, 4), last = numbers(5, 4);
  std::vector<int> a(4), b(4);
  const auto received = world[1].receive(a, 0), next = world[1].receive(b, 0, 1);
  std::atomic<bool> is_sent{false};
  // In the thread that receives, between its look into the ring and its look after the peers.
  received->ticket().when_done([&] {
    while (!is_sent) std::this_thread::yield();
    (void)world[0].send(last, 1, 1);
    world.ranks[0].reset();
    std::this_thread::sleep_for(2 * SharedGroup::kSlice);
  });
  (void)world[0].send(first, 1);
  is_sent = true;
  CHECK(next->ticket().wait(kLong, {}));
  CHECK(b == last);
}

TEST(the_other_side_leaves) {
  World world(2);
  std::vector<int> in(4);
  const auto lonely = world[1].receive(in, 0);
  world.ranks[0].reset();
  try {
    (void)world[1].mail.wait(*lonely, kLong, {}, {});
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.code() == Code::kPeerLost && error.ranks() == std::vector<int>{0});
  }
}

TEST(stopping_fails_what_is_in_progress) {
  World world(2);
  std::vector<int> in(4);
  const auto pending = world[1].receive(in, 0);
  world[1].mail.stop();
  CHECK_THROWS(Code::kPeerLost, pending->ticket().wait(kLong, {}));
  CHECK_THROWS(Code::kPeerLost, world[1].send(in, 0));
  CHECK_THROWS(Code::kPeerLost, world[1].receive(in, 0));
}
