#include "torchrelay/transport/stream.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <cerrno>
#include <string>

namespace torchrelay::transport {
namespace {

Moved moved(ssize_t count) {
  if (count >= 0) return {static_cast<std::size_t>(count), false};
  return {0, errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR};
}

}  // namespace

PlainStream::PlainStream(Descriptor socket) : socket_(std::move(socket)) {
  const int on = 1;
  setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
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

Descriptor start_connecting(const Address& address) noexcept {
  addrinfo hints{}, *found = nullptr;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  const std::string port = std::to_string(address.port);
  if (getaddrinfo(address.host.c_str(), port.c_str(), &hints, &found) != 0) {
    errno = EADDRNOTAVAIL;
    return {};
  }
  Descriptor socket(::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int result = socket ? ::connect(socket.get(), found->ai_addr, found->ai_addrlen) : -1;
  const int error = errno;
  freeaddrinfo(found);
  errno = error;
  if (result == 0 || errno == EINPROGRESS) return socket;
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

}  // namespace torchrelay::transport
