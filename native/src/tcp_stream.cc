#include "tcp_stream.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "torchrelay/error.h"

namespace torchrelay {
namespace {

constexpr auto kRetry = std::chrono::milliseconds(100);      // between two attempts to connect
constexpr auto kDrainPoll = std::chrono::microseconds(500);  // closing endpoints looks this often
constexpr int kUnixBuffer = 4 << 20;  // the kernel takes what it allows; TCP's grow by themselves
constexpr std::string_view kScheme = "direct://";

}  // namespace

SocketAddress address_of_interface(const std::string& interface) {
  SocketAddress result;
  addrinfo hints{}, *found = nullptr;
  hints.ai_flags = AI_NUMERICHOST | AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(interface.c_str(), "0", &hints, &found) == 0) {
    std::memcpy(&result.storage, found->ai_addr, found->ai_addrlen);
    result.size = found->ai_addrlen;
    freeaddrinfo(found);
    return result;
  }
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) throw Error(Code::kUnavailable, with_errno("listing this host's interfaces"));
  for (const ifaddrs* each = all; each != nullptr && result.size == 0; each = each->ifa_next) {
    if (interface != each->ifa_name || each->ifa_addr == nullptr) continue;
    if (each->ifa_addr->sa_family == AF_INET) result.size = sizeof(sockaddr_in);
    if (each->ifa_addr->sa_family == AF_INET6) result.size = sizeof(sockaddr_in6);
    std::memcpy(&result.storage, each->ifa_addr, result.size);
  }
  freeifaddrs(all);
  if (result.size == 0)
    throw Error(Code::kUnavailable,
                "binding '" + interface + "': this host has no such address or interface");
  return result;
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

SocketAddress parse_address(const std::string& text) {
  const auto colon = text.rfind(':');
  if (text.starts_with("tcp://"))
    throw Error(Code::kArgument, "connecting to '" + text +
                                     "': that node speaks ZeroMQ, this one plain sockets; give all nodes the "
                                     "same transport settings and, if any, the same key file");
  const auto fail = [&text] { throw Error(Code::kArgument, "connecting to '" + text + "': not an address"); };
  if (!text.starts_with(kScheme) || colon < kScheme.size()) fail();
  std::string host = text.substr(kScheme.size(), colon - kScheme.size());
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{}, *found = nullptr;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(host.c_str(), text.c_str() + colon + 1, &hints, &found) != 0) fail();
  SocketAddress result;
  std::memcpy(&result.storage, found->ai_addr, found->ai_addrlen);
  result.size = found->ai_addrlen;
  freeaddrinfo(found);
  return result;
}

std::string address_text(const SocketAddress& address) {
  char host[INET6_ADDRSTRLEN + IF_NAMESIZE + 1], port[8];
  if (getnameinfo(address.get(), address.size, host, sizeof host, port, sizeof port,
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    throw Error(Code::kUnavailable, "the bound address cannot be shown");
  const bool ipv6 = address.storage.ss_family == AF_INET6;
  return std::string(kScheme) + (ipv6 ? "[" : "") + host + (ipv6 ? "]:" : ":") + port;
}

void Stream::send(Message message, Flusher& flusher) {
  const std::lock_guard lock(mutex_);
  const bool was_idle = backlog_.empty();
  const std::uint64_t size = message.size_bytes();
  backlog_.push_back({std::move(message), size, 0});
  if (was_idle && flush_locked()) flusher.add(shared_from_this());
}

bool Stream::flush() {
  const std::lock_guard lock(mutex_);
  return flush_locked();
}

bool Stream::idle() {
  const std::lock_guard lock(mutex_);
  return backlog_.empty();
}

bool Stream::is_refused() {
  const std::lock_guard lock(mutex_);
  return refused_;
}

Stream::Waiting Stream::waiting() {
  const std::lock_guard lock(mutex_);
  return {socket_.get(), give_up_at_ != Clock::time_point::max()};
}

void Stream::close(Clock::time_point deadline) {
  const std::lock_guard lock(mutex_);
  give_up_at_ = deadline;
}

bool Stream::flush_locked() {
  if (Clock::now() >= give_up_at_) backlog_.clear();
  if (backlog_.empty()) return false;
  if (!socket_ && !connect_locked()) return true;
  while (!backlog_.empty()) {
    if (!write_some(backlog_.front())) return true;
    backlog_.pop_front();
  }
  return false;
}

bool Stream::connect_locked() {
  if (Clock::now() < retry_at_) return false;
  retry_at_ = Clock::now() + kRetry;
  const int family = address_.storage.ss_family;
  socket_ = Descriptor(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket_) return false;
  if (family == AF_UNIX) {
    setsockopt(socket_.get(), SOL_SOCKET, SO_SNDBUF, &kUnixBuffer, sizeof kUnixBuffer);
  } else {
    const int on = 1;
    const auto peer_timeout_ms = static_cast<unsigned>(options_.peer_timeout.count());
    setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(socket_.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &peer_timeout_ms, sizeof peer_timeout_ms);
  }
  preamble_sent_ = 0;
  if (::connect(socket_.get(), address_.get(), address_.size) == 0 || errno == EINPROGRESS) return true;
  refused_ = errno == ECONNREFUSED;
  socket_.reset();
  return false;
}

// True once all of the item is sent.
bool Stream::write_some(Item& item) {
  const Preamble preamble{kSessionMagic, kTcpProtocolVersion, 0, options_.token};
  for (;;) {
    std::array<iovec, 3> parts{};
    std::size_t count = 0, total = 0;
    const auto add = [&](const void* data, std::size_t size, std::size_t done) {
      if (done >= size) return;
      parts[count++] = {static_cast<char*>(const_cast<void*>(data)) + done, size - done};
      total += size - done;
    };
    add(&preamble, sizeof preamble, preamble_sent_);
    add(&item.size, sizeof item.size, item.sent);
    add(item.message.data(), item.message.size_bytes(),
        item.sent > sizeof item.size ? item.sent - sizeof item.size : 0);
    if (total == 0) return true;
    msghdr header{};
    header.msg_iov = parts.data();
    header.msg_iovlen = count;
    const ssize_t sent = sendmsg(socket_.get(), &header, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) broken(errno);
      return false;
    }
    refused_ = false;
    const auto of_preamble = std::min(static_cast<std::size_t>(sent), sizeof preamble - preamble_sent_);
    preamble_sent_ += of_preamble;
    item.sent += static_cast<std::size_t>(sent) - of_preamble;
    if (static_cast<std::size_t>(sent) == total) return true;
  }
}

// What was partly sent is lost with the connection; the rest waits for a new one.
void Stream::broken(int error) {
  refused_ = error == ECONNREFUSED;
  socket_.reset();
  retry_at_ = Clock::now() + kRetry;
  if (!backlog_.empty() && backlog_.front().sent != 0) backlog_.pop_front();
}

Flusher::~Flusher() {
  {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) return;
    stop_ = true;
  }
  wake();
  thread_.join();
}

void Flusher::add(std::shared_ptr<Stream> stream) {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) {
    wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_) throw Error(Code::kUnavailable, with_errno("a thread for full sockets"));
    thread_ = std::thread([this] { run(); });
  }
  added_.push_back(std::move(stream));
  wake();
}

void Flusher::wake() {
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
}

void Flusher::run() {
  std::vector<std::shared_ptr<Stream>> streams;
  std::vector<pollfd> items;
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (stop_) return;
      streams.insert(streams.end(), added_.begin(), added_.end());
      added_.clear();
    }
    items.assign(1, {wake_.get(), POLLIN, 0});
    int timeout_ms = -1;
    for (const auto& stream : streams) {
      const auto [fd, closed] = stream->waiting();
      items.push_back({fd, POLLOUT, 0});  // poll overlooks a negative one
      if (fd < 0 || closed) timeout_ms = static_cast<int>(std::chrono::milliseconds(kRetry).count());
    }
    ::poll(items.data(), items.size(), timeout_ms);
    std::uint64_t count;
    (void)!::read(wake_.get(), &count, sizeof count);
    std::size_t kept = 0;
    for (const auto& stream : streams)
      if (stream->flush()) streams[kept++] = stream;
    streams.resize(kept);
  }
}

void Flusher::drain(const std::vector<std::shared_ptr<Stream>>& streams, Stream::Clock::time_point deadline) {
  for (const auto& stream : streams)
    while (!stream->idle() && Stream::Clock::now() < deadline) std::this_thread::sleep_for(kDrainPoll);
}

}  // namespace torchrelay
