#include "net/stream.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace torchrelay::net {
namespace {

Moved moved(ssize_t count) {
  if (count >= 0) return {static_cast<std::size_t>(count), false};
  return {0, errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR};
}

}  // namespace

void send_without_delay(int socket) noexcept {
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

PlainStream::PlainStream(Descriptor socket) : socket_(std::move(socket)) {
  send_without_delay(socket_.get());
}

Moved PlainStream::read(std::byte* data, std::size_t size_bytes) {
  const ssize_t count = ::recv(socket_.get(), data, size_bytes, MSG_DONTWAIT);
  if (count == 0) return {0, true};
  return moved(count);
}

Moved PlainStream::write(const iovec* parts, int count) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = static_cast<std::size_t>(count);
  return moved(::sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL));
}

bool resolve(const std::string& host, const std::string& port, SocketAddress& result) noexcept {
  addrinfo hints{}, *found = nullptr;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return false;
  std::memcpy(&result.storage, found->ai_addr, found->ai_addrlen);
  result.size = found->ai_addrlen;
  freeaddrinfo(found);
  return true;
}

Descriptor start_connecting(const SocketAddress& address, const std::function<void(int)>& prepare) {
  Descriptor socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return socket;
  if (prepare) prepare(socket.get());
  if (::connect(socket.get(), address.get(), address.size) == 0 || errno == EINPROGRESS) return socket;
  const int error = errno;
  socket.reset();
  errno = error;
  return socket;
}

Descriptor start_connecting(const Address& address) noexcept {
  SocketAddress resolved;
  if (resolve(address.host, std::to_string(address.port), resolved)) return start_connecting(resolved);
  errno = EADDRNOTAVAIL;
  return {};
}

int connect_error(int socket) noexcept {
  int error = 0;
  socklen_t size = sizeof error;
  return getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

bool is_reachable(const Address& address, std::chrono::milliseconds timeout) noexcept {
  const Descriptor socket = start_connecting(address);
  if (!socket) return false;
  pollfd wait{socket.get(), POLLOUT, 0};
  return ::poll(&wait, 1, static_cast<int>(timeout.count())) == 1 && connect_error(socket.get()) == 0;
}

}  // namespace torchrelay::net
