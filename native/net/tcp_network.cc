#include "net/tcp_network.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <deque>
#include <fstream>
#include <new>
#include <random>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/error.h"
#include "core/origin.h"
#include "net/listener.h"
#include "net/outbound.h"

namespace torchrelay {

using net::EventLoop;
using net::Frame;
using net::Greeting;
using net::Listener;
using net::Outbound;
using net::resolve;
using net::SocketAddress;
using net::Stream;

namespace {

// Equal for processes that can reach each other's abstract Unix sockets; empty if that cannot be known.
std::string network_namespace() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot_id;
  file >> boot_id;
  struct stat status{};
  if (stat("/proc/self/ns/net", &status) != 0) return "";
  return boot_id + "/" + std::to_string(status.st_ino);
}

// For an abstract Unix socket.
std::string random_socket_name() {
  std::random_device random;
  std::string name = "torchrelay-";
  for (int i = 0; i < 4; ++i) name += std::to_string(random());
  return name;
}

// The Unix part of an "address|socket name|network namespace", if we are in that namespace; else the address.
struct Reachable {
  std::string address;
  bool local;
};

Reachable reachable(const std::string& address, const std::string& namespace_id) {
  const auto first = address.find('|'), last = address.rfind('|');
  if (first == std::string::npos) return {address, false};
  if (namespace_id.empty() || address.substr(last + 1) != namespace_id)
    return {address.substr(0, first), false};
  return {address.substr(first + 1, last - first - 1), true};
}

}  // namespace

struct TcpNetwork::State {
  NetworkOptions options;
  std::string namespace_id = network_namespace();
  std::atomic<std::uint64_t> ignored_connections = 0;
  std::shared_ptr<EventLoop> loop = EventLoop::shared();  // sends what sockets do not accept at once
};

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kBufferBytes = std::size_t{64} << 10;  // of a connection
constexpr std::size_t kReadBudget = std::size_t{2} << 20;    // of one connection before the others' turn
constexpr int kUnixBuffer = 4 << 20;  // the kernel takes what it allows; TCP's grow by themselves
constexpr int kListenBacklog = 1024;
constexpr std::string_view kScheme = "tcp://";

SocketAddress address_of_interface(const std::string& interface) {
  SocketAddress result;
  if (resolve(interface, "0", result)) return result;
  throw Error(Code::kUnavailable, "binding '" + interface + "': this host has no such address");
}

SocketAddress unix_address(const std::string& abstract_name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;  // an abstract name starts with a zero
  const std::size_t length = std::min(abstract_name.size(), sizeof address.sun_path - 1);
  std::memcpy(address.sun_path + 1, abstract_name.data(), length);
  SocketAddress result;
  std::memcpy(&result.storage, &address, sizeof address);
  result.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return result;
}

// From "tcp://host:port" and back.
SocketAddress parse_address(const std::string& text) {
  const auto colon = text.rfind(':');
  SocketAddress result;
  if (text.starts_with(kScheme) && colon >= kScheme.size()) {
    std::string host = text.substr(kScheme.size(), colon - kScheme.size());
    if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
    if (resolve(host, text.substr(colon + 1), result)) return result;
  }
  throw Error(Code::kArgument, "connecting to '" + text + "': not an address");
}

std::string address_text(const SocketAddress& address) {
  char host[NI_MAXHOST], port[8];
  if (getnameinfo(address.get(), address.size, host, sizeof host, port, sizeof port,
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    throw Error(Code::kUnavailable, "the bound address cannot be shown");
  const bool ipv6 = address.storage.ss_family == AF_INET6;
  return std::string(kScheme) + (ipv6 ? "[" : "") + host + (ipv6 ? "]:" : ":") + port;
}

Descriptor start_connecting(const SocketAddress& address, std::chrono::milliseconds peer_timeout) {
  return net::start_connecting(address, [&](int socket) {
    if (address.storage.ss_family == AF_UNIX) {
      setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &kUnixBuffer, sizeof kUnixBuffer);
    } else {
      const auto timeout_ms = static_cast<unsigned>(peer_timeout.count());
      setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof timeout_ms);
    }
  });
}

Descriptor listen_at(const SocketAddress& address, const std::string& name) {
  Descriptor socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket || ::bind(socket.get(), address.get(), address.size) != 0 ||
      ::listen(socket.get(), kListenBacklog) != 0)
    throw Error(Code::kUnavailable, with_errno("binding " + name) + "; does this host have that interface?");
  return socket;
}

// One connection by which a peer sends.
class Inbound final : public net::FrameSink {
 public:
  Inbound(std::unique_ptr<Stream> stream, std::size_t max_message_bytes, std::deque<Message>& messages)
      : stream_(std::move(stream)), max_message_bytes_(max_message_bytes), messages_(messages) {}

  int fd() const { return stream_->fd(); }
  // Whether take() stopped before it took all, of which the socket has nothing.
  bool has_buffered() const { return budget_ == 0 && stream_->has_buffered(); }
  bool is_garbled() const { return is_garbled_; }

  // Takes what is there, at most about one large message. False: the connection has ended.
  bool take() {
    budget_ = kReadBudget;
    return reader_.read(*stream_, *this, budget_) && !is_garbled_;
  }

  bool open(const Frame& frame) override {
    is_garbled_ = frame.kind != net::FrameKind::kData || frame.size_bytes > max_message_bytes_;
    try {
      if (!is_garbled_) message_ = Message::allocate(frame.size_bytes);
    } catch (const std::bad_alloc&) {
      is_garbled_ = true;
    }
    return !is_garbled_;
  }

  std::byte* place() override { return message_.data(); }

  bool close() override {
    messages_.push_back(std::move(message_));
    budget_ = 0;  // handle it, and what came with it, before more is read
    return true;
  }

 private:
  const std::unique_ptr<Stream> stream_;
  const std::size_t max_message_bytes_;
  std::deque<Message>& messages_;
  net::FrameReader reader_{kBufferBytes};
  Message message_;  // that is being received
  std::size_t budget_ = 0;
  bool is_garbled_ = false;
};

class TcpEndpoint final : public Endpoint {
 public:
  explicit TcpEndpoint(std::shared_ptr<TcpNetwork::State> state) : state_(std::move(state)) {
    SocketAddress bound = address_of_interface(state_->options.interface);
    Descriptor tcp = listen_at(bound, state_->options.interface);
    bound.size = sizeof bound.storage;
    getsockname(tcp.get(), reinterpret_cast<sockaddr*>(&bound.storage), &bound.size);
    address_ = address_text(bound);
    listen(std::move(tcp), state_->options.tls);
    if (!state_->options.local_sockets || state_->namespace_id.empty()) return;
    const std::string name = random_socket_name();
    listen(listen_at(unix_address(name), name), nullptr);
    address_ += "|" + name + "|" + state_->namespace_id;
  }

  ~TcpEndpoint() override {
    while (!outbound_.empty()) disconnect(outbound_.begin()->first);
    for (const auto& outbound : closing_) outbound->end();
  }

  std::string address() const override { return address_; }

  void connect(std::uint32_t peer, const std::string& address) override {
    const std::string name = address.substr(0, address.find('|'));
    const SocketAddress remote = parse_address(name);
    const auto [text, local] = reachable(address, state_->options.local_sockets ? state_->namespace_id : "");
    disconnect(peer);
    const SocketAddress target = local ? unix_address(text) : remote;
    outbound_[peer] = std::make_shared<Outbound>(
        *state_->loop,
        [target, name, timeout = state_->options.peer_timeout,
         tls = local ? nullptr : state_->options.tls]() -> std::unique_ptr<Stream> {
          Descriptor socket = start_connecting(target, timeout);
          return socket ? net::open_stream(tls.get(), std::move(socket), true, name) : nullptr;
        },
        Greeting{.token = state_->options.token});
  }

  void disconnect(std::uint32_t peer) override {
    std::erase_if(closing_, [](const auto& outbound) {
      if (!outbound->is_done()) return false;
      outbound->end();
      return true;
    });
    const auto found = outbound_.find(peer);
    if (found == outbound_.end()) return;
    found->second->close(Clock::now() + state_->options.linger);
    closing_.push_back(std::move(found->second));
    outbound_.erase(found);
  }

  void send(std::uint32_t peer, Message message) override {
    const auto found = outbound_.find(peer);
    if (found == outbound_.end())
      throw Error(Code::kArgument, "send to " + std::to_string(peer) + ": no such peer was connected");
    if (message.size_bytes() > state_->options.max_message_bytes)
      throw Error(Code::kArgument, "send to " + std::to_string(peer) + ": " +
                                       std::to_string(message.size_bytes()) +
                                       " bytes are more than the limit of " +
                                       std::to_string(state_->options.max_message_bytes));
    found->second->send(std::move(message));
  }

  bool is_refused(std::uint32_t peer) const override {
    const auto found = outbound_.find(peer);
    return found != outbound_.end() && found->second->is_refused();
  }

  bool has_unsent(std::uint32_t peer) const override {
    const auto found = outbound_.find(peer);
    return found != outbound_.end() && !found->second->is_done() && !found->second->is_refused();
  }

  bool receive(Message& message, std::chrono::microseconds timeout) override {
    const auto start = Clock::now();
    const auto deadline = start + timeout;
    Clock::duration longest{0};
    for (auto now = start;; now = Clock::now()) {
      for (const auto& [inbound, id] : std::exchange(unread_, {})) take(inbound, id);
      if (!messages_.empty()) break;
      if (now >= deadline && now != start) return false;
      loop_.run_for(longest);
      if (error_) throw Error(*std::exchange(error_, nullptr));
      longest = unread_.empty() ? deadline - now : Clock::duration(0);
    }
    message = std::move(messages_.front());
    messages_.pop_front();
    return true;
  }

 private:
  void listen(Descriptor socket, std::shared_ptr<const net::Tls> tls) {
    listeners_.push_back(
        std::make_unique<Listener>(loop_, std::move(socket),
                                   net::ListenerOptions{.token = state_->options.token,
                                                        .tls = std::move(tls),
                                                        .name = address_,
                                                        .greeting_timeout = state_->options.greeting_timeout,
                                                        .turned_away = &state_->ignored_connections},
                                   [this](std::unique_ptr<Stream> stream, const Greeting& greeting) {
                                     return admit(std::move(stream), greeting);
                                   }));
  }

  bool admit(std::unique_ptr<Stream> stream, const Greeting& greeting) {
    if (greeting.version != net::kVersion) {
      error_ = std::make_unique<Error>(
          Code::kProtocol, "a peer speaks version " + std::to_string(greeting.version) +
                               " of the message protocol, this process version " +
                               std::to_string(net::kVersion) + "; install the same torchrelay on all nodes");
      return true;
    }
    const auto inbound =
        std::make_shared<Inbound>(std::move(stream), state_->options.max_message_bytes, messages_);
    const auto id = std::make_shared<EventLoop::Id>();
    *id = loop_.watch(inbound->fd(), EPOLLIN, [this, inbound, id](std::uint32_t) { take(inbound, *id); });
    take(inbound, *id);  // a stream may have read ahead
    return true;
  }

  void take(const std::shared_ptr<Inbound>& inbound, EventLoop::Id id) {
    if (inbound->take()) {
      if (inbound->has_buffered()) unread_.emplace_back(inbound, id);
      return;
    }
    if (inbound->is_garbled()) state_->ignored_connections.fetch_add(1, std::memory_order_relaxed);
    loop_.forget(id);
  }

  std::shared_ptr<TcpNetwork::State> state_;
  EventLoop loop_{EventLoop::Driver::kCaller};  // of what arrives
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::string address_;
  std::deque<Message> messages_;
  std::vector<std::pair<std::shared_ptr<Inbound>, EventLoop::Id>> unread_;  // they make no event
  std::unique_ptr<Error> error_;
  std::unordered_map<std::uint32_t, std::shared_ptr<Outbound>> outbound_;
  std::vector<std::shared_ptr<Outbound>> closing_;
};

}  // namespace

TcpNetwork::TcpNetwork(NetworkOptions options) : state_(make_process_owned<State>()) {
  state_->options = std::move(options);
}

TcpNetwork::~TcpNetwork() = default;

std::unique_ptr<Endpoint> TcpNetwork::open(const std::string&) {
  return std::make_unique<TcpEndpoint>(state_);
}

std::uint64_t TcpNetwork::ignored_connections() const noexcept { return state_->ignored_connections; }

}  // namespace torchrelay
