// Needs the path of a libzmq 4.3 in the environment variable TORCHRELAY_LIBZMQ; the pyzmq wheel carries one.
#include "torchrelay/zmq_network.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "check.h"
#include "endpoints.h"

using namespace std::chrono_literals;
using torchrelay::Code;
using torchrelay::Message;
using torchrelay::ZmqContext;
using torchrelay::ZmqNetwork;
using torchrelay::ZmqOptions;
using torchrelay::testing::message;
using torchrelay::testing::receive;
using torchrelay::testing::stranger_socket;

namespace {

// Key pairs made for this test alone.
constexpr const char* kPublic = "S#:<.wav^%5?]NUqGJDjtVdFCZ&B!dr3g>FoI9-f";
constexpr const char* kSecret = "Yjcoxr)s9iOPmptmgv.xkP[[tKRNi@LM[BZdLv>+";
constexpr const char* kOtherPublic = "4BCR@O%-^rNO8zlOgcp0uJVmrjnnMe={W]c/m^]$";
constexpr const char* kOtherSecret = "-6z@YV$ZZ6NibJZV4g{pD&yjY&r%B0zjUEGTD>eq";

std::shared_ptr<ZmqContext> context() {
  const char* path = std::getenv("TORCHRELAY_LIBZMQ");
  if (path == nullptr) throw torchrelay::testing::Failure{"set TORCHRELAY_LIBZMQ to the path of libzmq.so"};
  return std::make_shared<ZmqContext>(path);
}

ZmqNetwork network(const ZmqOptions& options = {}) { return ZmqNetwork(context(), options); }

std::string tcp_only(const std::string& address) { return address.substr(0, address.find('|')); }

std::string over(const ZmqOptions& sender_options, const ZmqOptions& receiver_options,
                 std::chrono::microseconds timeout) {
  auto senders = network(sender_options), receivers = network(receiver_options);
  auto receiver = receivers.open("b");
  auto sender = senders.open("a");
  sender->connect(1, tcp_only(receiver->address()));
  sender->send(1, message("hello"));
  return receive(*receiver, timeout);
}

}  // namespace

TEST(messages_arrive_in_order_over_tcp_and_unix_sockets) {
  for (const bool local : {false, true}) {
    ZmqOptions options;
    options.local_sockets = local;
    auto net = network(options);
    auto a = net.open("a"), b = net.open("b");
    CHECK((b->address().find("ipc://@") != std::string::npos) == local);
    a->connect(7, b->address());
    std::thread sender([&] {
      for (int i = 0; i < 1000; ++i) a->send(7, message(std::to_string(i) + std::string(i % 7 * 1000, 'x')));
    });
    for (int i = 0; i < 1000; ++i)
      CHECK(receive(*b) == std::to_string(i) + std::string(static_cast<std::size_t>(i % 7 * 1000), 'x'));
    sender.join();
  }
}

TEST(large_messages_are_shared_not_copied_and_released_once) {
  auto net = network();
  auto a = net.open("a"), b = net.open("b");
  a->connect(0, b->address());
  std::weak_ptr<void> watched;
  {
    Message large = Message::allocate(std::size_t{8} << 20);
    std::memset(large.data(), 5, large.size_bytes());
    watched = large.holder();
    a->send(0, std::move(large));
  }
  Message got;
  CHECK(b->receive(got, 10s));
  CHECK(got.size_bytes() == std::size_t{8} << 20 && got.data()[got.size_bytes() - 1] == std::byte{5});
  CHECK(reinterpret_cast<std::uintptr_t>(got.data()) % 8 == 0);
  for (int i = 0; i < 1000 && !watched.expired(); ++i) std::this_thread::sleep_for(10ms);
  CHECK(watched.expired());
}

TEST(a_received_message_outlives_its_network) {
  Message got;
  {
    auto net = network();
    auto a = net.open("a"), b = net.open("b");
    a->connect(0, b->address());
    a->send(0, message(std::string(100000, 'q')));
    CHECK(b->receive(got, 10s));
  }
  CHECK(got.size_bytes() == 100000 && got.data()[99999] == std::byte{'q'});
}

TEST(receive_times_out) {
  auto net = network();
  auto a = net.open("a");
  const auto start = std::chrono::steady_clock::now();
  CHECK(receive(*a, 20ms) == "(nothing)");
  CHECK(std::chrono::steady_clock::now() - start >= 20ms);
}

TEST(peers_can_be_replaced_and_disconnected) {
  auto net = network();
  auto a = net.open("a"), b = net.open("b"), c = net.open("c");
  a->connect(0, b->address());
  a->connect(0, c->address());
  a->send(0, message("to c"));
  CHECK(receive(*c) == "to c");
  a->disconnect(0);
  CHECK_THROWS(Code::kArgument, a->send(0, message("to nobody")));
  CHECK_THROWS(Code::kArgument, a->connect(0, "nonsense"));
}

TEST(another_token_is_a_stranger) {
  ZmqOptions other;
  other.token[3] = 1;
  auto net = network(), strangers = network(other);
  auto a = net.open("a"), b = net.open("b"), stranger = strangers.open("s");
  stranger->connect(0, b->address());
  stranger->send(0, message("let me in"));
  for (int i = 0; i < 1000 && net.ignored_messages() == 0; ++i) CHECK(receive(*b, 10ms) == "(nothing)");
  CHECK(net.ignored_messages() == 1);
  a->connect(0, b->address());
  a->send(0, message("friend"));
  CHECK(receive(*b) == "friend");
}

TEST(the_size_limit_holds_on_both_sides) {
  ZmqOptions small;
  small.max_message_bytes = 1000;
  auto net = network(small);
  auto a = net.open("a"), b = net.open("b");
  a->connect(0, b->address());
  CHECK_THROWS(Code::kArgument, a->send(0, message(std::string(1001, 'x'))));
  auto careless_net = network();
  auto careless = careless_net.open("c");
  careless->connect(0, b->address());
  careless->send(0, message(std::string(1001, 'x')));
  a->send(0, message("fits"));
  CHECK(receive(*b) == "fits");
  CHECK(receive(*b, 100ms) == "(nothing)");
}

TEST(curve_lets_in_who_has_the_keys_and_nobody_else) {
  ZmqOptions ours, theirs, plain;
  ours.curve_public_key = kPublic;
  ours.curve_secret_key = kSecret;
  theirs.curve_public_key = kOtherPublic;
  theirs.curve_secret_key = kOtherSecret;
  for (auto* options : {&ours, &theirs, &plain}) options->linger = 0ms;
  CHECK(over(ours, ours, 10s) == "hello");
  CHECK(over(theirs, ours, 500ms) == "(nothing)");
  CHECK(over(plain, ours, 500ms) == "(nothing)");
  CHECK(over(ours, plain, 500ms) == "(nothing)");
}

TEST(malformed_keys_and_libraries_are_refused) {
  ZmqOptions options;
  options.curve_public_key = kPublic;
  CHECK_THROWS(Code::kArgument, network(options));
  options.curve_public_key = options.curve_secret_key = "short";
  CHECK_THROWS(Code::kArgument, network(options));
  CHECK_THROWS(Code::kUnavailable, ZmqContext("/nonexistent/libzmq.so"));
  CHECK_THROWS(Code::kUnavailable, ZmqContext("libc.so.6"));
  ZmqOptions elsewhere;
  elsewhere.interface = "192.0.2.1";
  auto net = network(elsewhere);
  CHECK_THROWS(Code::kUnavailable, net.open("a"));
}

TEST(hostile_bytes_on_the_port_do_nothing) {
  ZmqOptions options;
  options.local_sockets = false;
  auto net = network(options);
  auto a = net.open("a"), b = net.open("b");
  const std::string address = b->address();
  for (unsigned seed = 0; seed < 20; ++seed) {
    const int fd = stranger_socket(*b);
    std::string bytes(1000, '\0');
    for (auto& byte : bytes) byte = static_cast<char>(rand_r(&seed));
    if (seed % 2 == 0) bytes.replace(0, 12, std::string("\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00", 12));
    (void)!::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    ::close(fd);
  }
  a->connect(0, address);
  a->send(0, message("still here"));
  CHECK(receive(*b) == "still here");
}

TEST(many_senders_reach_one_receiver) {
  auto net = network();
  torchrelay::testing::many_senders_reach_one_receiver(net);
}
