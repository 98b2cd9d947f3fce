#include "net/tcp_network.h"

#include <sys/socket.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "check.h"
#include "endpoints.h"
#include "keys.h"

using namespace std::chrono_literals;
using torchrelay::Code;
using torchrelay::Message;
using torchrelay::NetworkOptions;
using torchrelay::TcpNetwork;
using torchrelay::testing::encryption;
using torchrelay::testing::message;
using torchrelay::testing::receive;
using torchrelay::testing::stranger_socket;

// TCP, Unix sockets, and TCP with a key.
std::vector<NetworkOptions> all_kinds() {
  std::vector<NetworkOptions> kinds(3);
  kinds[0].local_sockets = kinds[2].local_sockets = false;
  kinds[2].tls = encryption(1);
  return kinds;
}

TEST(messages_arrive_in_order_over_tcp_and_unix_sockets) {
  for (const NetworkOptions& options : all_kinds()) {
    const bool local = options.local_sockets;
    TcpNetwork net(options);
    auto a = net.open("a"), b = net.open("b");
    CHECK((b->address().find('|') != std::string::npos) == local);
    a->connect(7, b->address());
    std::thread sender([&] {
      for (int i = 0; i < 1000; ++i) a->send(7, message(std::to_string(i) + std::string(i % 7 * 1000, 'x')));
    });
    for (int i = 0; i < 1000; ++i)
      CHECK(receive(*b) == std::to_string(i) + std::string(static_cast<std::size_t>(i % 7 * 1000), 'x'));
    sender.join();
  }
}

// The receiver is slower than the sender, whose sockets fill up.
TEST(what_a_socket_does_not_take_at_once_arrives_in_order) {
  for (const NetworkOptions& options : all_kinds()) {
    TcpNetwork net(options);
    auto a = net.open("a"), b = net.open("b");
    a->connect(0, b->address());
    for (std::size_t i = 0; i < 40; ++i) {
      a->send(0, message(std::string(i % 3 == 0 ? 3'000'000 + i : 100 + i, static_cast<char>('0' + i))));
      CHECK(i != 20 || receive(*b) == std::string(3'000'000, '0'));
    }
    for (std::size_t i = 1; i < 40; ++i)
      CHECK(receive(*b) == std::string(i % 3 == 0 ? 3'000'000 + i : 100 + i, static_cast<char>('0' + i)));
  }
}

TEST(an_endpoint_that_closes_sends_what_it_has) {
  for (const NetworkOptions& options : all_kinds()) {
    TcpNetwork net(options);
    auto b = net.open("b");
    std::thread sender([&] {
      auto a = net.open("a");
      a->connect(0, b->address());
      for (int i = 0; i < 5; ++i) a->send(0, message(std::string(4'000'000, static_cast<char>('a' + i))));
    });
    for (int i = 0; i < 5; ++i) CHECK(receive(*b) == std::string(4'000'000, static_cast<char>('a' + i)));
    sender.join();
  }
}

// With the token, but another key or none, while a member sends.
TEST(who_lacks_the_key_gets_nothing_and_reaches_nobody) {
  for (const auto& other : {encryption(2), std::shared_ptr<const torchrelay::net::Tls>()}) {
    NetworkOptions options = all_kinds()[2], foreign = options;
    foreign.tls = other;
    TcpNetwork net(options), strangers(foreign);
    auto a = net.open("a"), b = net.open("b"), stranger = strangers.open("s");
    stranger->connect(0, b->address());
    stranger->send(0, message("let me in"));
    a->connect(0, b->address());
    a->connect(1, stranger->address());
    a->send(1, message("these are the gradients of a model"));
    for (int i = 0; i < 1000 && net.ignored_connections() == 0; ++i) {
      CHECK(receive(*b, 10ms) == "(nothing)");
      CHECK(receive(*stranger, 0ms) == "(nothing)");
    }
    CHECK(net.ignored_connections() >= 1);
    a->send(0, message("friend"));
    CHECK(receive(*b) == "friend");
  }
}

TEST(a_message_to_nobody_is_given_up_when_its_sender_closes) {
  NetworkOptions options;
  options.local_sockets = false;
  options.linger = 50ms;
  TcpNetwork net(options);
  std::string address = net.open("gone")->address();
  auto a = net.open("a");
  a->connect(0, address);
  a->send(0, message("is anybody there?"));
  const auto start = std::chrono::steady_clock::now();
  a.reset();
  CHECK(std::chrono::steady_clock::now() - start < 10s);
}

TEST(later_messages_come_on_a_new_connection_when_one_broke) {
  NetworkOptions options, small;
  small.max_message_bytes = 1000;
  TcpNetwork net(options), narrow(small);
  auto a = net.open("a"), b = narrow.open("b");
  a->connect(0, b->address());
  a->send(0, message(std::string(1001, 'x')));  // b ends the connection
  for (int i = 0; i < 1000 && narrow.ignored_connections() == 0; ++i) CHECK(receive(*b, 10ms) == "(nothing)");
  std::string got;
  for (int i = 0; i < 100 && got != "fits"; ++i) {
    a->send(0, message("fits"));
    got = receive(*b, 100ms);
  }
  CHECK(got == "fits");
  TcpNetwork careful(small);
  auto c = careful.open("c");
  c->connect(0, b->address());
  CHECK_THROWS(Code::kArgument, c->send(0, message(std::string(1001, 'x'))));
}

TEST(a_peer_that_has_ended_refuses) {
  for (const bool local_sockets : {false, true}) {
    NetworkOptions options;
    options.local_sockets = local_sockets;
    TcpNetwork net(options);
    auto sender = net.open("sender"), receiver = net.open("receiver");
    sender->connect(0, receiver->address());
    sender->send(0, message("hello"));
    CHECK(receive(*receiver) == "hello");
    CHECK(!sender->is_refused(0));
    CHECK(!sender->is_refused(1));
    receiver.reset();
    const auto end = std::chrono::steady_clock::now() + 20s;
    while (!sender->is_refused(0)) {
      CHECK(std::chrono::steady_clock::now() < end);
      sender->send(0, message("are you there?"));
      std::this_thread::sleep_for(20ms);
    }
  }
}

TEST(messages_are_unsent_until_a_peer_reads_or_ends) {
  const std::string large(std::size_t{1} << 24, 'x');  // more than a socket holds
  for (const bool local_sockets : {false, true}) {
    NetworkOptions options;
    options.local_sockets = local_sockets;
    TcpNetwork net(options);
    auto sender = net.open("sender"), receiver = net.open("receiver");
    CHECK(!sender->has_unsent(0));
    sender->connect(0, receiver->address());
    for (const bool reads : {true, false}) {
      for (int i = 0; i < 2; ++i) sender->send(0, message(large));
      CHECK(sender->has_unsent(0));
      if (!reads) receiver.reset();
      const auto end = std::chrono::steady_clock::now() + 20s;
      while (sender->has_unsent(0)) {
        CHECK(std::chrono::steady_clock::now() < end);
        if (reads)
          receive(*receiver, 20ms);
        else
          std::this_thread::sleep_for(20ms);
      }
    }
  }
}

TEST(receive_times_out) {
  TcpNetwork net(NetworkOptions{});
  auto a = net.open("a");
  const auto start = std::chrono::steady_clock::now();
  CHECK(receive(*a, 20ms) == "(nothing)");
  CHECK(std::chrono::steady_clock::now() - start >= 20ms);
}

TEST(peers_can_be_replaced_and_disconnected) {
  TcpNetwork net(NetworkOptions{});
  auto a = net.open("a"), b = net.open("b"), c = net.open("c");
  a->connect(0, b->address());
  a->connect(0, c->address());
  a->send(0, message("to c"));
  CHECK(receive(*c) == "to c");
  a->disconnect(0);
  CHECK_THROWS(Code::kArgument, a->send(0, message("to nobody")));
  CHECK_THROWS(Code::kArgument, a->connect(0, "nonsense"));
  CHECK_THROWS(Code::kArgument, a->connect(0, "udp://127.0.0.1:1"));
}

TEST(another_token_is_a_stranger) {
  NetworkOptions other;
  other.token[3] = 1;
  TcpNetwork net(NetworkOptions{}), strangers(other);
  auto a = net.open("a"), b = net.open("b"), stranger = strangers.open("s");
  stranger->connect(0, b->address());
  stranger->send(0, message("let me in"));
  for (int i = 0; i < 1000 && net.ignored_connections() == 0; ++i) CHECK(receive(*b, 10ms) == "(nothing)");
  CHECK(net.ignored_connections() >= 1);
  a->connect(0, b->address());
  a->send(0, message("friend"));
  CHECK(receive(*b) == "friend");
}

void be_hostile(const NetworkOptions& options) {
  TcpNetwork net(options);
  auto a = net.open("a"), b = net.open("b");
  std::vector<int> silent;
  for (unsigned seed = 0; seed < 100; ++seed) {
    const int fd = stranger_socket(*b);
    silent.push_back(fd);
    if (seed % 2 == 0) continue;
    std::string bytes(1000, '\0');
    for (auto& byte : bytes) byte = static_cast<char>(rand_r(&seed));
    if (seed % 3 == 0) bytes.replace(0, 4, "TRLA");
    (void)!::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    CHECK(receive(*b, 0ms) == "(nothing)");
  }
  a->connect(0, b->address());
  a->send(0, message("still here"));
  CHECK(receive(*b) == "still here");
  for (const int fd : silent) ::close(fd);
}

TEST(hostile_bytes_and_silent_strangers_do_nothing) {
  for (const NetworkOptions& options : all_kinds()) be_hostile(options);
}

TEST(many_senders_reach_one_receiver) {
  TcpNetwork net(NetworkOptions{});
  torchrelay::testing::many_senders_reach_one_receiver(net);
}

// All come before the receiver looks, so that it accepts them in one go.
TEST(a_flood_of_connections_does_not_keep_a_peer_out) {
  NetworkOptions options;
  options.local_sockets = false;
  TcpNetwork network(options);
  auto receiver = network.open("r"), sender = network.open("s");
  std::vector<int> flood;
  const auto connections = [&] {
    for (int i = 0; i < 200; ++i) flood.push_back(stranger_socket(*receiver));
  };
  connections();
  sender->connect(0, receiver->address());
  sender->send(0, message("here"));
  connections();
  CHECK(receive(*receiver) == "here");
  sender->send(0, message("still here"));
  CHECK(receive(*receiver) == "still here");
  for (const int fd : flood) close(fd);
}

// It accepts the connection, and is busy until long after the time for the greeting.
TEST(a_receiver_that_is_busy_turns_no_peer_away) {
  for (NetworkOptions options : all_kinds()) {
    options.greeting_timeout = 20ms;
    TcpNetwork net(options);
    auto receiver = net.open("r"), sender = net.open("s");
    sender->connect(0, receiver->address());
    sender->send(0, message("here"));
    for (int i = 0; i < 3; ++i) {
      Message none;
      if (receiver->receive(none, 0ms)) {
        CHECK(std::string(reinterpret_cast<const char*>(none.data()), none.size_bytes()) == "here");
        sender->send(0, message("here"));
      }
      std::this_thread::sleep_for(100ms);
    }
    CHECK(receive(*receiver) == "here");
  }
}
