// Encrypted streams over socket pairs.
#include "net/tls.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "keys.h"

using namespace torchrelay;
using namespace torchrelay::net;
using torchrelay::testing::libssl;

namespace {

using Bytes = std::vector<std::byte>;

Key key_of(unsigned char first) {
  Key key;
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<unsigned char>(first + i);
  return key;
}

std::pair<Descriptor, Descriptor> sockets() {
  int both[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, both) == 0);
  return {Descriptor(both[0]), Descriptor(both[1])};
}

Bytes pattern(std::size_t size) {
  Bytes out(size);
  for (std::size_t i = 0; i < size; ++i) out[i] = static_cast<std::byte>(i * 31 + i / 251);
  return out;
}

// Two ends that have a key and the name of the one that accepts.
struct Pair {
  explicit Pair(const Tls& connecting = Tls(libssl(), key_of(1)),
                const Tls& accepting = Tls(libssl(), key_of(1)), const char* named = "1",
                const char* name = "1") {
    auto both = sockets();
    from = connecting.open(std::move(both.first), true, named);
    to = accepting.open(std::move(both.second), false, name);
  }

  std::pair<Negotiation, Negotiation> negotiate() {
    auto a = Negotiation::kInProgress, b = a;
    for (int i = 0; i < 10; ++i) a = from->negotiate(), b = to->negotiate();
    return {a, b};
  }

  std::unique_ptr<Stream> from, to;
};

constexpr std::pair kBothDone{Negotiation::kDone, Negotiation::kDone};
constexpr std::pair kBothFailed{Negotiation::kFailed, Negotiation::kFailed};

// Moves all of it, as an event loop would.
Bytes move(Stream& from, Stream& to, const Bytes& data, std::size_t head, std::size_t step) {
  Bytes got(data.size());
  std::size_t sent = 0, received = 0;
  while (received < got.size()) {
    iovec parts[2];
    int count = 0;
    if (sent < head) parts[count++] = {const_cast<std::byte*>(data.data()) + sent, head - sent};
    const std::size_t second = std::max(sent, head);
    if (second < data.size())
      parts[count++] = {const_cast<std::byte*>(data.data()) + second, data.size() - second};
    if (count != 0 || from.has_unsent()) sent += from.write(parts, count).size_bytes;
    const Moved moved = to.read(got.data() + received, std::min(step, got.size() - received));
    CHECK(!moved.ended);
    received += moved.size_bytes;
  }
  CHECK(sent == data.size() && !from.has_unsent());
  return got;
}

void send_raw(int socket, const std::string& data) {
  CHECK(::send(socket, data.data(), data.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(data.size()));
}

std::string receive_raw(int socket) {
  std::string data(1 << 16, 0);
  const ssize_t count = ::recv(socket, data.data(), data.size(), MSG_DONTWAIT);
  data.resize(count < 0 ? 0 : static_cast<std::size_t>(count));
  return data;
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST(bytes_arrive_in_both_directions) {
  Pair pair;
  CHECK(pair.negotiate() == kBothDone);
  for (const std::size_t size : {1, 24, 16384, 16385, 1 << 20, 5'000'000}) {
    const Bytes data = pattern(size);
    CHECK(move(*pair.from, *pair.to, data, std::min<std::size_t>(size, 24), 512) == data);
    CHECK(move(*pair.to, *pair.from, data, 0, 256 << 10) == data);
  }
  CHECK(pair.from->failure().empty() && pair.to->failure().empty());
}

TEST(the_socket_gets_no_plain_bytes) {
  const Tls tls(libssl(), key_of(1));
  auto [wire, a] = sockets();
  auto [other, b] = sockets();
  const auto from = tls.open(std::move(a), true, "1"), to = tls.open(std::move(b), false, "1");
  std::string seen;
  const auto pass = [&, &wire = wire, &other = other] {  // Clang before 16 captures no structured bindings
    const std::string there = receive_raw(wire.get()), back = receive_raw(other.get());
    if (!there.empty()) send_raw(other.get(), there);
    if (!back.empty()) send_raw(wire.get(), back);
    seen += there + back;
  };
  for (int i = 0; i < 10; ++i) from->negotiate(), pass(), to->negotiate(), pass();
  const std::string secret = "these are the gradients of a model";
  const iovec part{const_cast<char*>(secret.data()), secret.size()};
  CHECK(from->write(&part, 1).size_bytes == secret.size());
  pass();
  std::string got(secret.size(), ' ');
  CHECK(to->read(reinterpret_cast<std::byte*>(got.data()), got.size()).size_bytes == got.size());
  CHECK(got == secret && seen.size() > secret.size() && !contains(seen, "gradients"));
}

TEST(another_key_is_named_by_both_ends) {
  Pair pair(Tls(libssl(), key_of(1)), Tls(libssl(), key_of(2)));
  CHECK(pair.negotiate() == kBothFailed);
  CHECK(contains(pair.from->failure(), "has another key"));
  CHECK(contains(pair.to->failure(), "has another key"));
}

TEST(a_connection_to_another_process_than_wanted_is_refused) {
  Pair pair(Tls(libssl(), key_of(1)), Tls(libssl(), key_of(1)), "1", "2");
  CHECK(pair.negotiate() == kBothFailed);
  CHECK(contains(pair.from->failure(), "did not agree"));
}

TEST(keys_are_replaced_while_bytes_move) {
  const Tls tls(libssl(), key_of(1), 100'000);
  Pair pair(tls, tls);
  CHECK(pair.negotiate() == kBothDone);
  const Bytes data = pattern(3'000'000);
  CHECK(move(*pair.from, *pair.to, data, 24, 70'000) == data);
  CHECK(move(*pair.to, *pair.from, data, 24, 70'000) == data);
}

TEST(strangers_get_nowhere) {
  const Tls tls(libssl(), key_of(1));
  for (const std::string& words : {std::string("TRLA"), std::string(40, '\0'), std::string(9000, 'x'),
                                   std::string("\x16\x03\x01\x40\x00\x01\x00\x3f\xfc", 9)}) {
    auto [stranger, accepted] = sockets();
    const auto stream = tls.open(std::move(accepted), false, "1");
    send_raw(stranger.get(), words);
    auto result = stream->negotiate();
    if (result == Negotiation::kInProgress) {  // a handshake that does not end
      for (int i = 0; i < 5 && result == Negotiation::kInProgress; ++i) {
        send_raw(stranger.get(), std::string(8000, 'x'));
        result = stream->negotiate();
      }
    }
    CHECK(result == Negotiation::kFailed && !stream->failure().empty());
    CHECK(!contains(receive_raw(stranger.get()), "torchrelay"));
  }
}

TEST(a_handshake_that_ends_early_fails) {
  Pair pair;
  CHECK(pair.from->negotiate() == Negotiation::kInProgress);
  pair.from.reset();
  CHECK(pair.to->negotiate() == Negotiation::kInProgress || !pair.to->failure().empty());
  CHECK(pair.to->negotiate() == Negotiation::kFailed && contains(pair.to->failure(), "same key"));
}

TEST(changed_bytes_end_the_connection_and_those_before_are_received) {
  auto [wire, a] = sockets();
  auto [other, b] = sockets();
  const Tls tls(libssl(), key_of(1));
  const auto from = tls.open(std::move(a), true, "1"), to = tls.open(std::move(b), false, "1");
  const auto pass = [&, &wire = wire, &other = other](bool is_changed) {
    std::string there = receive_raw(wire.get());
    const std::string back = receive_raw(other.get());
    if (is_changed) there.back() = static_cast<char>(there.back() ^ 1);
    if (!there.empty()) send_raw(other.get(), there);
    if (!back.empty()) send_raw(wire.get(), back);
  };
  for (int i = 0; i < 10; ++i) from->negotiate(), pass(false), to->negotiate(), pass(false);
  char word[] = "word";
  const iovec part{word, 4};
  from->write(&part, 1);
  pass(false);
  from->write(&part, 1);
  pass(true);
  std::byte got[8];
  const Moved first = to->read(got, sizeof got), second = to->read(got, sizeof got);
  CHECK(first.size_bytes == 4 && !first.ended && second.ended);
  CHECK(contains(to->failure(), "were changed on their way"));
}

TEST(a_library_that_is_not_there_is_an_error) {
  CHECK_THROWS(Code::kUnavailable, Tls("libno-such-library.so", key_of(1)));
  CHECK_THROWS(Code::kUnavailable, Tls("libm.so.6", key_of(1)));
}

TEST(both_directions_at_once) {
  Pair pair;
  CHECK(pair.negotiate() == kBothDone);
  const Bytes data = pattern(2'000'000);
  Bytes there(data.size()), back(data.size());
  const auto receive = [&](Stream& stream, Bytes& into) {
    for (std::size_t got = 0; got < into.size();)
      got += stream.read(into.data() + got, into.size() - got).size_bytes;
  };
  const auto send = [&](Stream& stream) {
    for (std::size_t sent = 0; sent < data.size() || stream.has_unsent();) {
      const iovec part{const_cast<std::byte*>(data.data()) + sent, data.size() - sent};
      sent += stream.write(&part, sent < data.size() ? 1 : 0).size_bytes;
    }
  };
  std::thread threads[] = {std::thread([&] { send(*pair.from); }), std::thread([&] { send(*pair.to); }),
                           std::thread([&] { receive(*pair.to, there); }),
                           std::thread([&] { receive(*pair.from, back); })};
  for (auto& each : threads) each.join();
  CHECK(there == data && back == data);
}
