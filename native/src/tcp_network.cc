#include "torchrelay/tcp_network.h"

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <unordered_map>

#include "tcp_stream.h"
#include "torchrelay/error.h"
#include "torchrelay/origin.h"

namespace torchrelay {

struct TcpNetwork::State {
  NetworkOptions options;
  std::string namespace_id = network_namespace();
  std::atomic<std::uint64_t> ignored_connections = 0;
  Flusher flusher;
};

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kBufferBytes = std::size_t{64} << 10;  // of a connection; larger messages go around it
constexpr std::size_t kMaxStrangers = 64;                    // connections that have not said who they are
constexpr int kMaxAccepts = 64;  // in a row, before what known peers sent is taken in
constexpr int kMaxEvents = 32;
constexpr int kListenBacklog = 1024;

// Bytes of one connection as they arrive, and the complete messages.
class Inbound {
 public:
  enum class Result { kAlive, kEnded, kStranger };

  Inbound(Descriptor socket, const NetworkOptions& options)
      : socket_(std::move(socket)), options_(&options), buffer_(new std::byte[kBufferBytes]) {}

  int fd() const { return socket_.get(); }
  bool known() const { return known_; }

  // Takes what is there, at most about one large message. Throws kProtocol for another version.
  Result take(std::deque<Message>& messages) {
    for (;;) {
      std::byte* to = large_.data() != nullptr ? large_.data() + large_filled_ : buffer_.get() + filled_;
      const std::size_t room =
          large_.data() != nullptr ? large_.size_bytes() - large_filled_ : kBufferBytes - filled_;
      const ssize_t got = recv(fd(), to, room, MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return errno == EAGAIN ? Result::kAlive : Result::kEnded;
      if (got == 0) return Result::kEnded;
      if (large_.data() == nullptr) {
        filled_ += static_cast<std::size_t>(got);
        if (!parse(messages)) return Result::kStranger;
      } else if ((large_filled_ += static_cast<std::size_t>(got)) == large_.size_bytes()) {
        messages.push_back(std::move(large_));
        large_ = Message();
      }
      // A full read may have left bytes; the next poll of the descriptor reports them.
      if (static_cast<std::size_t>(got) < room || !messages.empty()) return Result::kAlive;
    }
  }

 private:
  // False: not a peer of the session, or nothing it would say.
  bool parse(std::deque<Message>& messages) {
    std::size_t at = 0;
    if (!known_) {
      if (filled_ < sizeof(Preamble)) return true;
      if (!greet()) return false;
      at = sizeof(Preamble);
    }
    std::uint64_t size = 0;
    while (filled_ - at >= sizeof size) {
      std::memcpy(&size, buffer_.get() + at, sizeof size);
      if (size > options_->max_message_bytes) return false;
      const std::size_t here = std::min<std::uint64_t>(size, filled_ - at - sizeof size);
      if (here < size && size <= kBufferBytes / 2) break;  // soon whole
      Message message = Message::allocate(size);
      if (here != 0) std::memcpy(message.data(), buffer_.get() + at + sizeof size, here);
      at += sizeof size + here;
      if (here == size) {
        messages.push_back(std::move(message));
      } else {
        large_ = std::move(message);
        large_filled_ = here;
      }
    }
    std::memmove(buffer_.get(), buffer_.get() + at, filled_ - at);
    filled_ -= at;
    return true;
  }

  bool greet() {
    Preamble preamble;
    std::memcpy(&preamble, buffer_.get(), sizeof preamble);
    known_ = preamble.magic == kSessionMagic && equal(preamble.token, options_->token);
    if (known_ && preamble.version != kTcpProtocolVersion)
      throw Error(Code::kProtocol, "a peer speaks version " + std::to_string(preamble.version) +
                                       " of the socket protocol, this process version " +
                                       std::to_string(kTcpProtocolVersion) +
                                       "; install the same torchrelay on all nodes");
    return known_;
  }

  Descriptor socket_;
  const NetworkOptions* options_;
  std::unique_ptr<std::byte[]> buffer_;
  std::size_t filled_ = 0;
  Message large_;  // being received, past the buffer
  std::size_t large_filled_ = 0;
  bool known_ = false;
};

class TcpEndpoint final : public Endpoint {
 public:
  explicit TcpEndpoint(std::shared_ptr<TcpNetwork::State> state)
      : state_(std::move(state)), poller_(epoll_create1(EPOLL_CLOEXEC)) {
    if (!poller_) throw Error(Code::kUnavailable, with_errno("a new endpoint"));
    SocketAddress bound = address_of_interface(state_->options.interface);
    tcp_ = listen_at(bound, state_->options.interface);
    bound.size = sizeof bound.storage;
    getsockname(tcp_.get(), reinterpret_cast<sockaddr*>(&bound.storage), &bound.size);
    address_ = address_text(bound);
    if (!state_->options.local_sockets || state_->namespace_id.empty()) return;
    const std::string name = random_socket_name();
    unix_ = listen_at(unix_address(name), name);
    address_ += "|" + name + "|" + state_->namespace_id;
  }

  ~TcpEndpoint() override {
    const auto deadline = Clock::now() + state_->options.linger;
    std::vector<std::shared_ptr<Stream>> streams;
    for (auto& [peer, stream] : outbound_) {
      stream->close(deadline);
      streams.push_back(std::move(stream));
    }
    Flusher::drain(streams, deadline);
  }

  std::string address() const override { return address_; }

  void connect(std::uint32_t peer, const std::string& address) override {
    const SocketAddress remote = parse_address(address.substr(0, address.find('|')));
    const auto [text, local] = reachable(address, state_->options.local_sockets ? state_->namespace_id : "");
    disconnect(peer);
    outbound_[peer] = std::make_shared<Stream>(state_->options, local ? unix_address(text) : remote);
  }

  void disconnect(std::uint32_t peer) override {
    const auto found = outbound_.find(peer);
    if (found == outbound_.end()) return;
    found->second->close(Clock::now() + state_->options.linger);
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
    found->second->send(std::move(message), state_->flusher);
  }

  bool is_refused(std::uint32_t peer) const override {
    const auto found = outbound_.find(peer);
    return found != outbound_.end() && found->second->is_refused();
  }

  bool receive(Message& message, std::chrono::microseconds timeout) override {
    const auto start = Clock::now();
    const auto deadline = start + timeout;
    const auto spin_end = start + std::min(timeout, state_->options.spin);
    for (auto now = start;; now = Clock::now()) {
      if (messages_.empty()) look();
      if (!messages_.empty()) break;
      if (now >= deadline) return false;
      now < spin_end ? std::this_thread::yield() : wait(deadline - now);
    }
    message = std::move(messages_.front());
    messages_.pop_front();
    return true;
  }

 private:
  Descriptor listen_at(const SocketAddress& address, const std::string& name) {
    Descriptor socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket || ::bind(socket.get(), address.get(), address.size) != 0 ||
        ::listen(socket.get(), kListenBacklog) != 0)
      throw Error(Code::kUnavailable,
                  with_errno("binding " + name) + "; does this host have that interface?");
    watch(socket.get());
    return socket;
  }

  void watch(int fd) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (epoll_ctl(poller_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
      throw Error(Code::kUnavailable, with_errno("watching a socket"));
  }

  void wait(Clock::duration longest) {
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(longest).count();
    timespec pause{};
    pause.tv_sec = ns / 1'000'000'000;
    pause.tv_nsec = ns % 1'000'000'000;
    pollfd item{poller_.get(), POLLIN, 0};
    ppoll(&item, 1, &pause, nullptr);
  }

  // Reads what has arrived, without waiting.
  void look() {
    std::array<epoll_event, kMaxEvents> events;
    const int count = epoll_wait(poller_.get(), events.data(), kMaxEvents, 0);
    for (int i = 0; i < count; ++i) {
      const int fd = events[static_cast<std::size_t>(i)].data.fd;
      fd == tcp_.get() || fd == unix_.get() ? accept_from(fd) : take_from(fd);
    }
  }

  void accept_from(int listener) {
    for (int accepts = 0; accepts < kMaxAccepts; ++accepts) {
      Descriptor socket(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!socket) return;
      const int fd = socket.get();
      watch(fd);
      inbound_.emplace(fd, Inbound(std::move(socket), state_->options));
      strangers_.push_back(fd);
      while (strangers_.size() > kMaxStrangers) end_oldest_stranger();
    }
  }

  // Unless it has said by now who it is: a flood of connections must not keep a peer out.
  void end_oldest_stranger() {
    const int fd = strangers_.front();
    take_from(fd);
    if (!strangers_.empty() && strangers_.front() == fd) end(fd, true);
  }

  void take_from(int fd) {
    const auto found = inbound_.find(fd);
    if (found == inbound_.end()) return;
    const bool was_known = found->second.known();
    const auto result = found->second.take(messages_);
    if (!was_known && found->second.known()) std::erase(strangers_, fd);
    if (result != Inbound::Result::kAlive) end(fd, result == Inbound::Result::kStranger);
  }

  void end(int fd, bool stranger) {
    if (stranger) state_->ignored_connections.fetch_add(1, std::memory_order_relaxed);
    std::erase(strangers_, fd);
    inbound_.erase(fd);  // closing it also ends the watch
  }

  std::shared_ptr<TcpNetwork::State> state_;
  Descriptor poller_;
  Descriptor tcp_, unix_;  // listening
  std::string address_;
  std::unordered_map<int, Inbound> inbound_;
  std::deque<int> strangers_;  // oldest first
  std::deque<Message> messages_;
  std::unordered_map<std::uint32_t, std::shared_ptr<Stream>> outbound_;
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
