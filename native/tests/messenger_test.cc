// Ranks are messengers in one process, and plain sockets where a rank does what it should not.
#include "group/messenger.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <mutex>
#include <numeric>
#include <thread>

#include "check.h"
#include "keys.h"
#include "ports.h"

using namespace torchrelay;
using namespace torchrelay::net;
using torchrelay::testing::encryption;
using torchrelay::testing::Port;

namespace {

constexpr std::chrono::seconds kLong{60};
constexpr std::size_t kLarge = std::size_t{3} << 20;

Descriptor connect_to(const Address& address) {
  Descriptor out(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(address.port);
  CHECK(::connect(out.get(), reinterpret_cast<sockaddr*>(&to), sizeof to) == 0);
  return out;
}

template <class Condition>
void wait_until(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + kLong;
  while (!condition()) {
    CHECK(std::chrono::steady_clock::now() < end);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

using Bytes = std::vector<unsigned char>;

Block block(Bytes& data) { return {reinterpret_cast<std::byte*>(data.data()), data.size()}; }

Bytes pattern(std::size_t size, unsigned seed) {
  Bytes out(size);
  for (std::size_t i = 0; i < size; ++i) out[i] = static_cast<unsigned char>(i * 31 + i / 251 + seed);
  return out;
}

// `hosts`: how many ranks there are on each. A rank that is not `run` is only a listener.
struct World {
  explicit World(const std::vector<int>& hosts, std::vector<int> run = {},
                 const std::function<void(MessengerOptions&)>& adjust = {}) {
    MessengerOptions options;
    for (std::size_t i = 0; i < options.token.size(); ++i) options.token[i] = static_cast<unsigned char>(i);
    for (const int size : hosts) {
      options.hosts.emplace_back();
      for (int i = 0; i < size; ++i)
        options.hosts.back().push_back(static_cast<int>(listeners.size())), listeners.emplace_back();
    }
    for (std::size_t rank = 0; rank < listeners.size(); ++rank) {
      options.names.push_back(static_cast<int>(rank));
      options.addresses.push_back(listeners[rank].address);
    }
    if (adjust) adjust(options);
    token = options.token;
    ranks.resize(listeners.size());
    if (run.empty()) {
      run.resize(ranks.size());
      std::iota(run.begin(), run.end(), 0);
    }
    for (const int rank : run) {
      options.rank = rank;
      const auto index = static_cast<std::size_t>(rank);
      ranks[index] = std::make_unique<Messenger>(
          options, std::move(listeners[index].socket),
          [this](Block data, int source, std::int32_t tag, std::uint8_t code,
                 std::chrono::nanoseconds timeout) {
            auto transfer = std::make_shared<Transfer>(data, source, tag, code, timeout);
            const std::lock_guard guard(lock);
            return local.emplace_back(std::move(transfer));
          },
          [](const Error&) {});
    }
  }

  Messenger& operator[](int rank) { return *ranks[static_cast<std::size_t>(rank)]; }
  const Address& address(int rank) const { return listeners[static_cast<std::size_t>(rank)].address; }

  std::shared_ptr<Transfer> send(int from, int to, Bytes& data, int tag = 0, std::uint8_t code = 7) {
    return (*this)[from].send(block(data), to, tag, code, kLong);
  }
  std::shared_ptr<Transfer> receive(int at, int source, Bytes& data, int tag = 0, std::uint8_t code = 7) {
    return (*this)[at].receive(block(data), source, tag, code, kLong);
  }
  void wait(int rank, const std::shared_ptr<Transfer>& transfer) {
    CHECK((*this)[rank].wait(transfer, kLong, {}));
  }

  // A connection by which `rank` sends, which is not run.
  Descriptor connection_of(int rank, int to) {
    const Greeting greeting{.rank = static_cast<std::uint32_t>(rank), .token = token};
    Descriptor out = connect_to(address(to));
    CHECK(::send(out.get(), &greeting, sizeof greeting, 0) == sizeof greeting);
    return out;
  }

  std::vector<Port> listeners;
  std::mutex lock;
  std::vector<std::shared_ptr<Transfer>> local;  // receives of what is in shared memory, which never ends
  std::vector<std::unique_ptr<Messenger>> ranks;
  SessionToken token{};
};

Bytes frame(unsigned char kind, const Bytes& body, std::uint64_t size, std::int32_t tag = 0) {
  Bytes out(24);
  out[0] = kind;
  std::memcpy(&out[8], &tag, sizeof tag);
  std::memcpy(&out[16], &size, sizeof size);
  out.insert(out.end(), body.begin(), body.end());
  return out;
}

void send_all(const Descriptor& socket, const Bytes& data) {
  CHECK(::send(socket.get(), data.data(), data.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(data.size()));
}

std::string text_of(Messenger& messenger, const std::shared_ptr<Transfer>& transfer) {
  try {
    CHECK(messenger.wait(transfer, kLong, {}));
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST(messages_of_all_sizes_arrive_in_order) {
  World world({1, 1});
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, std::size_t{500}, std::size_t{70000}, kLarge}) {
    Bytes first = pattern(size, 1), second = pattern(size, 2), a(size), b(size);
    const auto sent = {world.send(0, 1, first), world.send(0, 1, second)};
    const auto received = {world.receive(1, 0, a), world.receive(1, kAnyRank, b)};
    for (const auto& each : sent) world.wait(0, each);
    for (const auto& each : received) world.wait(1, each);
    CHECK(a == first && b == second);
  }
}

TEST(receives_that_are_posted_first_get_the_same_bytes) {
  World world({1, 1});
  Bytes data = pattern(kLarge, 3), got(kLarge);
  const auto received = world.receive(1, 0, got, 5);
  const auto sent = world.send(0, 1, data, 5);
  world.wait(0, sent);
  world.wait(1, received);
  CHECK(got == data && received->source() == 0);
}

TEST(tags_are_matched_and_a_large_message_does_not_block_one_that_is_awaited) {
  World world({1, 1});
  Bytes large = pattern(kLarge, 4), small = pattern(8, 5), got_large(kLarge), got_small(8);
  const auto first = world.send(0, 1, large, 1);
  const auto second = world.send(0, 1, small, 2);
  const auto wanted = world.receive(1, 0, got_small, 2);
  world.wait(1, wanted);
  const auto rest = world.receive(1, 0, got_large, 1);
  world.wait(1, rest);
  world.wait(0, first);
  world.wait(0, second);
  CHECK(got_small == small && got_large == large);
}

TEST(what_nobody_awaits_is_parked_up_to_a_limit) {
  World world({1, 1}, {}, [](MessengerOptions& options) { options.parked_bytes = 3000; });
  std::vector<Bytes> out(10, pattern(1000, 6)), in(10, Bytes(1000));
  std::vector<std::shared_ptr<Transfer>> sent;
  for (auto& each : out) sent.push_back(world.send(0, 1, each));
  wait_until([&] { return world[1].received_bytes() >= 3000; });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(world[1].received_bytes() == 3000);
  for (auto& each : in) world.wait(1, world.receive(1, 0, each));
  for (const auto& each : sent) world.wait(0, each);
  CHECK(in == out);
}

TEST(a_message_from_any_rank_names_its_source) {
  World world({1, 1, 1});
  Bytes data = pattern(10, 7), got(10);
  const auto received = world.receive(0, kAnyRank, got, 9);
  const auto sent = world.send(2, 0, data, 9);
  world.wait(2, sent);
  world.wait(0, received);
  CHECK(received->source() == 2 && got == data);
}

TEST(another_size_or_type_fails_the_receive_only) {
  World world({1, 1});
  Bytes data = pattern(12, 8), four(4), twelve(12);
  for (const bool is_posted_first : {false, true}) {
    std::shared_ptr<Transfer> wrong;
    if (is_posted_first) wrong = world.receive(1, 0, four);
    const auto sent = world.send(0, 1, data);
    world.wait(0, sent);
    if (!is_posted_first) wrong = world.receive(1, 0, four);
    const std::string text = text_of(world[1], wrong);
    CHECK(contains(text, "rank 1, recv from rank 0, tag 0: rank 0 sent 12 bytes of float32"));
    CHECK_THROWS(Code::kMismatch, world[1].wait(wrong, kLong, {}));
  }
  const auto sent = world.send(0, 1, data);
  const auto other = world.receive(1, 0, twelve, 0, 8);
  CHECK_THROWS(Code::kMismatch, world[1].wait(other, kLong, {}));
  world.wait(0, sent);
  world.wait(0, world.send(0, 1, data));
  world.wait(1, world.receive(1, 0, twelve));
  CHECK(twelve == data);
}

TEST(a_receive_that_is_late_is_cancelled_and_its_message_kept) {
  World world({1, 1});
  Bytes data = pattern(100, 9), got(100);
  const auto received = world[1].receive(block(got), 0, 0, 7, std::chrono::milliseconds(20));
  CHECK(!world[1].wait(received, std::chrono::milliseconds(1), {}));
  CHECK(contains(text_of(world[1], received), "recv from rank 0, tag 0: no answer"));
  world.wait(0, world.send(0, 1, data));
  world.wait(1, world.receive(1, 0, got));
  CHECK(got == data);
}

TEST(a_late_receive_keeps_its_memory_while_a_message_from_shared_memory_arrives) {
  World world({2}, {0});
  Bytes got(8);
  const auto sender = world.connection_of(1, 0);
  const auto received = world[0].receive(block(got), 1, 0, 0, std::chrono::milliseconds(20));
  send_all(sender, frame(1, {}, got.size()));
  wait_until([&] {
    const std::lock_guard guard(world.lock);
    return !world.local.empty();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(!world[0].wait(received, std::chrono::milliseconds(1), {}));
  world.local[0]->ticket().finish(std::make_exception_ptr(Error(Code::kTimeout, "in shared memory")));
  CHECK(text_of(world[0], received) == "in shared memory");
}

TEST(a_frame_does_not_go_on_over_another_connection) {
  Bytes large(kLarge * 4);
  World world({1, 1}, {0});
  const auto sent = world.send(0, 1, large);
  Descriptor first(::accept(world.listeners[1].socket.get(), nullptr, nullptr));
  char begin[100];
  CHECK(::recv(first.get(), begin, sizeof begin, MSG_WAITALL) == sizeof begin);
  first.reset();
  const auto second = world.connection_of(1, 0);
  CHECK(::recv(second.get(), begin, sizeof begin, 0) == 0);
  CHECK(contains(text_of(world[0], sent), "rank 1 has died or cannot be reached any more"));
}

TEST(many_threads_send_at_once) {
  World world({1, 1, 1});
  std::vector<std::thread> threads;
  for (int from = 0; from < 3; ++from)
    for (int tag = 0; tag < 3; ++tag)
      threads.emplace_back([&world, from, tag] {
        for (unsigned round = 0; round < 20; ++round)
          for (int to = 0; to < 3; ++to) {
            if (to == from) continue;
            const std::size_t size = 1 + round * 7001;
            Bytes data = pattern(size, round), got(size);
            const auto received = world.receive(from, to, got, tag);
            const auto sent = world.send(from, to, data, tag);
            world.wait(from, sent);
            world.wait(from, received);
            CHECK(got == data);
          }
      });
  for (auto& each : threads) each.join();
}

TEST(a_failure_reaches_all_ranks_and_the_first_one_counts) {
  World world({1, 1, 1});
  Bytes data(8), got(8);
  const auto received = world.receive(2, 1, got);
  world[0].fail({Code::kTimeout, "rank 1 is late", {1}});
  world[0].fail({Code::kPeerLost, "rank 2 has died", {2}});
  for (int rank = 0; rank < 3; ++rank) {
    wait_until([&] { return world[rank].failure().has_value(); });
    CHECK(std::string(world[rank].failure()->what()) == "rank 1 is late");
    CHECK(world[rank].failure()->code() == Code::kTimeout);
    CHECK(world[rank].failure()->ranks() == std::vector<int>{1});
  }
  CHECK(text_of(world[2], received) == "rank 1 is late");
  CHECK(text_of(world[1], world.send(1, 0, data)) == "rank 1 is late");
  CHECK(text_of(world[1], world.receive(1, 0, data)) == "rank 1 is late");
}

TEST(a_rank_that_leaves_is_named_once_what_it_sent_has_been_received) {
  World world({1, 1});
  Bytes data = pattern(100, 1), got(100), more(1);
  const auto sent = world.send(1, 0, data);
  world.wait(1, sent);
  world[1].close();
  world.wait(0, world.receive(0, 1, got));
  CHECK(got == data);
  CHECK(contains(text_of(world[0], world.receive(0, 1, more)), "rank 1 has left the group"));
  CHECK(!world[0].lost({1}));
}

TEST(closing_fails_what_is_in_progress) {
  World world({1, 1});
  Bytes data(8), large(kLarge * 4);
  const auto received = world.receive(0, 1, data);
  const auto sent = world.send(0, 1, large);
  world[0].close();
  CHECK(contains(text_of(world[0], received), "was destroyed on this rank"));
  CHECK(contains(text_of(world[0], sent), "was destroyed on this rank"));
  CHECK(contains(text_of(world[0], world.send(0, 1, data)), "was destroyed on this rank"));
}

TEST(a_rank_that_cannot_be_reached_is_lost) {
  World world({1, 1}, {0});
  world.listeners[1].socket.reset();
  Bytes data(8);
  const auto sent = world.send(0, 1, data);
  CHECK(contains(text_of(world[0], sent), "rank 1 cannot be reached ("));
  CHECK_THROWS(Code::kPeerLost, world[0].wait(sent, kLong, {}));
  const auto lost = world[0].lost({1});
  CHECK(lost && lost->ranks() == std::vector<int>{1});
}

TEST(a_rank_that_had_a_connection_and_refuses_another_is_lost_at_once) {
  World world({1, 1}, {0}, [](MessengerOptions& options) { options.reconnect = std::chrono::hours(24); });
  Bytes got(1), more(1);
  Descriptor sender = world.connection_of(1, 0);
  send_all(sender, frame(0, {'x'}, 1));
  wait_until([&] { return world[0].received_bytes() == 1; });  // else a receive would connect to it too
  world.wait(0, world.receive(0, 1, got, 0, 0));
  const auto received = world.receive(0, 1, more);
  world.listeners[1].socket.reset();
  sender.reset();
  CHECK(contains(text_of(world[0], received), "rank 1 has died"));
}

TEST(closing_waits_little_for_the_rank_because_of_which_the_group_broke) {
  World world({1, 1}, {0}, [](MessengerOptions& options) { options.flush_timeout = std::chrono::hours(24); });
  Bytes large(kLarge * 4);
  const auto sent = world.send(0, 1, large);
  const Descriptor deaf(::accept(world.listeners[1].socket.get(), nullptr, nullptr));
  world[0].fail({Code::kTimeout, "rank 1 is late", {1}});
  CHECK(text_of(world[0], sent) == "rank 1 is late");
  world[0].close();
}

TEST(a_message_of_a_rank_that_listens_no_more_arrives) {
  World world({1, 1}, {0}, [](MessengerOptions& options) { options.reconnect = kLong; });
  world.listeners[1].socket.reset();
  Bytes got(8);
  const auto received = world.receive(0, 1, got);
  const auto sender = world.connection_of(1, 0);
  send_all(sender, frame(0, Bytes(8, 1), 8));
  CHECK(text_of(world[0], received).find("rank 1 sent 8 bytes") != std::string::npos);  // of another type
}

TEST(a_receive_that_is_half_done_ends_with_the_group) {
  World world({1, 1}, {0});
  Bytes got(1 << 20);
  const auto received = world.receive(0, 1, got, 0, 0);
  const auto sender = world.connection_of(1, 0);
  send_all(sender, frame(0, Bytes(1000, 1), got.size()));
  wait_until([&] { return world[0].received_bytes() == got.size(); });
  world[0].fail({Code::kTimeout, "rank 2 is late", {2}});
  CHECK(text_of(world[0], received) == "rank 2 is late");
  send_all(sender, Bytes(1000, 2));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  world[0].close();
  for (const unsigned char each : got) CHECK(each != 2);
}

TEST(a_peer_that_sends_garbage_is_lost) {
  for (const Bytes& garbage : {frame(2, Bytes(4), 4), frame(9, {}, 0), frame(2, {}, 1 << 30)}) {
    World world({1, 1}, {0});
    const auto sender = world.connection_of(1, 0);
    Bytes got(8);
    const auto received = world.receive(0, 1, got);
    send_all(sender, garbage);
    CHECK(contains(text_of(world[0], received), "rank 1"));
  }
}

TEST(a_size_that_no_memory_holds_ends_the_connection) {
  World world({1, 1}, {0});
  const auto sender = world.connection_of(1, 0);
  Bytes got(8);
  const auto received = world.receive(0, 1, got);
  send_all(sender, frame(0, {}, std::uint64_t{1} << 63, 5));
  CHECK(contains(text_of(world[0], received), "rank 1"));
}

TEST(a_rank_that_is_no_leader_receives_the_cause_before_its_connection_ends) {
  World world({1, 2}, {0});
  const auto peer = world.connection_of(2, 0);
  Bytes got(1);
  send_all(peer, frame(0, {'x'}, 1));
  wait_until([&] { return world[0].received_bytes() == 1; });  // else a receive would connect to rank 2 too
  world.wait(0, world.receive(0, 2, got, 0, 0));
  world[0].fail({Code::kPeerLost, "rank 1 has died", {1}});
  std::string seen(4096, ' ');
  wait_until([&] {
    return ::recv(peer.get(), seen.data(), seen.size(), MSG_PEEK | MSG_DONTWAIT) > 24 &&
           contains(seen, "rank 1 has died");
  });
}

TEST(ranks_of_a_host_that_ended_without_a_word_are_named) {
  World world({1, 2}, {0});
  const Error gone(Code::kPeerLost, "rank 1 has died", {1});
  CHECK(world[0].with_host(gone, 1).ranks() == std::vector<int>{1});
  world.listeners[2].socket.reset();
  const Error both = world[0].with_host(gone, 1);
  CHECK(both.ranks() == (std::vector<int>{1, 2}));
  CHECK(contains(both.what(), "nor can rank 2 of its host be reached"));
}

TEST(a_rank_that_ended_after_its_report_is_not_named) {
  World world({1, 2}, {0}, [](MessengerOptions& options) { options.report_timeout = kLong; });
  const auto reporter = world.connection_of(2, 0);
  world.listeners[2].socket.reset();
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    Bytes body(12);
    const std::uint32_t fields[] = {0, 1, 1};
    std::memcpy(body.data(), fields, sizeof fields);
    for (const char each : std::string("rank 2, all_reduce: rank 1 has died"))
      body.push_back(static_cast<unsigned char>(each));
    send_all(reporter, frame(2, body, body.size()));
  });
  const Error error = world[0].with_host({Code::kPeerLost, "rank 1 has died", {1}}, 1);
  late.join();
  CHECK(error.ranks() == std::vector<int>{1});
  CHECK(std::string(world[0].failure()->what()) == "rank 2, all_reduce: rank 1 has died");
}

TEST(strangers_do_not_keep_ranks_from_each_other) {
  World world({1, 1}, {}, [](MessengerOptions& options) { options.max_strangers = 8; });
  std::vector<Descriptor> silent;
  for (int i = 0; i < 50; ++i) silent.push_back(connect_to(world.address(1)));
  for (auto& each : silent) ::send(each.get(), "TRLA", 4, MSG_NOSIGNAL);
  Bytes data = pattern(100, 1), got(100);
  world.wait(0, world.send(0, 1, data));
  world.wait(1, world.receive(1, 0, got));
  CHECK(got == data);
  for (int i = 0; i < 40; ++i) {  // those over the limit were closed
    char byte;
    CHECK(::recv(silent[static_cast<std::size_t>(i)].get(), &byte, 1, 0) <= 0);
  }
}

TEST(strangers_have_little_time_and_need_the_token) {
  World world({1, 1}, {0}, [](MessengerOptions& options) {
    options.greeting_timeout = std::chrono::milliseconds(20);
    options.token[3] = 77;
  });
  char byte;
  const auto silent = connect_to(world.address(0));
  CHECK(::recv(silent.get(), &byte, 1, 0) == 0);
  world.token[3] = 78;
  const auto wrong = world.connection_of(1, 0);
  CHECK(::recv(wrong.get(), &byte, 1, 0) <= 0);
}

TEST(encrypted_messages_of_all_sizes_arrive) {
  World world({1, 1, 1}, {}, [](MessengerOptions& options) { options.tls = encryption(1); });
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{70000}, 4 * kLarge})
    for (int round = 0; round < 3; ++round) {
      std::vector<Bytes> out, in(6, Bytes(size));
      std::vector<std::pair<int, std::shared_ptr<Transfer>>> all;
      for (unsigned i = 0; i < 6; ++i) out.push_back(pattern(size, i));
      for (int from = 0, i = 0; from < 3; ++from)
        for (int to = 0; to < 3; ++to) {
          if (from == to) continue;
          const auto index = static_cast<std::size_t>(i++);
          all.emplace_back(to, world.receive(to, from, in[index], round));
          all.emplace_back(from, world.send(from, to, out[index], round));
        }
      for (auto& [rank, transfer] : all) world.wait(rank, transfer);
      CHECK(in == out);
    }
  Bytes last = pattern(kLarge, 9), got(kLarge), more(1);
  const auto received = world.receive(0, 1, got);
  world.send(1, 0, last);
  world[1].close();
  world.wait(0, received);
  CHECK(got == last);
  CHECK(contains(text_of(world[0], world.receive(0, 1, more)), "rank 1 has left the group"));
  world[0].fail({Code::kTimeout, "rank 1 is late", {1}});
  wait_until([&] { return world[2].failure().has_value(); });
  CHECK(std::string(world[2].failure()->what()) == "rank 1 is late");
}

TEST(ranks_with_different_keys_learn_that_from_each_other) {
  MessengerOptions options;
  options.rank = 1;
  options.names = {0, 1};
  options.hosts = {{0}, {1}};
  for (const auto& other : {encryption(2), std::shared_ptr<const Tls>()}) {
    World world({1, 1}, {0}, [&](MessengerOptions& each) { each.tls = encryption(1); });
    options.addresses = {world.address(0), world.address(1)};
    options.token = world.token;
    options.tls = other;
    Messenger second(options, std::move(world.listeners[1].socket), {}, [](const Error&) {});
    Bytes a(8), b(8);
    const auto at_first = world.receive(0, 1, a);
    const auto at_second = second.receive(block(b), 0, 0, 7, kLong);
    CHECK(contains(text_of(world[0], at_first), other ? "rank 1 has another key" : "same key"));
    const std::string text = text_of(second, at_second);
    CHECK(contains(text, other ? "rank 0 has another key" : "rank 0"));
  }
}

TEST(garbage_and_slow_handshakes_stop_no_encrypted_rank) {
  World world({1, 1}, {}, [](MessengerOptions& options) {
    options.tls = encryption(1);
    options.greeting_timeout = std::chrono::milliseconds(100);
  });
  const char hello[] = "\x16\x03\x01\x01\x00\x01\x00\x00\xfc\x03\x03";  // the begin of a handshake
  std::vector<Descriptor> strangers;
  for (const auto& words : {std::string(hello, sizeof hello - 1), std::string("TRLA"), std::string(9000, 'x'),
                            std::string(200, '\0'), std::string()}) {
    strangers.push_back(connect_to(world.address(1)));
    ::send(strangers.back().get(), words.data(), words.size(), MSG_NOSIGNAL);
  }
  strangers.push_back(world.connection_of(0, 1));  // it has the token, and no key
  Bytes data = pattern(100, 1), got(100);
  world.wait(0, world.send(0, 1, data));
  world.wait(1, world.receive(1, 0, got));
  CHECK(got == data);
  for (const auto& each : strangers) {
    std::string answer(4096, ' ');
    ssize_t size;
    while ((size = ::recv(each.get(), answer.data(), answer.size(), 0)) > 0)
      CHECK(size < 64 && answer[0] == '\x15');  // an alert is all that they get
  }
}

TEST(there_is_no_such_rank) {
  World world({1, 1});
  Bytes data(1);
  CHECK_THROWS(Code::kArgument, world.send(0, 2, data));
  CHECK_THROWS(Code::kArgument, world.receive(0, -2, data));
}
