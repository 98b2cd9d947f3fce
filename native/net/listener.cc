#include "net/listener.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "core/error.h"

namespace torchrelay::net {
namespace {

constexpr int kMaxAccepted = 64;  // before the others' turn
constexpr std::chrono::milliseconds kRetryAccept{50};
constexpr std::chrono::seconds kStarved{1};

}  // namespace

struct Listener::Stranger {
  std::unique_ptr<Stream> stream;
  EventLoop::Id watch = 0, deadline = 0;
  std::array<std::byte, sizeof(Greeting)> bytes;
  std::size_t size = 0;
};

Listener::Listener(EventLoop& loop, Descriptor socket, ListenerOptions options, Admit admit)
    : loop_(loop),
      options_(options),
      admit_(std::move(admit)),
      socket_(std::move(socket)),
      spare_(eventfd(0, EFD_CLOEXEC)) {
  if (!spare_) throw Error(Code::kUnavailable, with_errno("keeping a file descriptor for a connection"));
  fcntl(socket_.get(), F_SETFL, fcntl(socket_.get(), F_GETFL) | O_NONBLOCK);
  const std::lock_guard guard(lock_);
  watch_ = loop_.watch(socket_.get(), EPOLLIN, [this](std::uint32_t) { accept_all(); });
}

void Listener::close() {
  std::vector<EventLoop::Id> ids;
  std::deque<StrangerPtr> strangers;
  {
    const std::lock_guard guard(lock_);
    if (std::exchange(closed_, true)) return;
    strangers.swap(strangers_);
    ids = {watch_, retry_};
    for (const auto& stranger : strangers) ids.insert(ids.end(), {stranger->watch, stranger->deadline});
  }
  for (const auto id : ids)
    if (id != 0) loop_.forget(id);
  loop_.finish_running();  // of one that was admitted meanwhile
  socket_.reset();
}

void Listener::accept_all() {
  if (!spare_) spare_ = Descriptor(eventfd(0, EFD_CLOEXEC));
  for (int i = 0; i < kMaxAccepted; ++i) {
    Descriptor socket(accept4(socket_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      const int error = errno;
      if (error == EAGAIN || error == EWOULDBLOCK) return;
      if (error == EINTR || error == ECONNABORTED) continue;
      if (spare_) {  // there may be no descriptor left
        spare_.reset();
        continue;
      }
      end_oldest();
      const auto now = EventLoop::Clock::now();
      if (!starved_) starved_ = now + kStarved;
      if (now >= *starved_ && options_.starved) options_.starved(error);
      const std::lock_guard guard(lock_);
      if (closed_) return;
      loop_.change(watch_, 0);
      retry_ =
          loop_.call_at(EventLoop::Clock::now() + kRetryAccept, [this] { loop_.change(watch_, EPOLLIN); });
      return;
    }
    starved_.reset();
    if (!add(std::move(socket))) return;
  }
}

// False: closed.
bool Listener::add(Descriptor socket) {
  bool is_full;
  {
    const std::lock_guard guard(lock_);
    is_full = strangers_.size() >= options_.max_strangers;
  }
  if (is_full) end_oldest();
  const auto stranger = std::make_shared<Stranger>();
  const int fd = socket.get();
  stranger->stream = open_stream(options_.tls.get(), std::move(socket), false, options_.name);
  const std::lock_guard guard(lock_);
  if (closed_) return false;
  try {
    stranger->watch = loop_.watch(fd, EPOLLIN, [this, stranger](std::uint32_t) { greet(stranger); });
  } catch (const Error&) {
    return true;  // the kernel watches no more of them
  }
  strangers_.push_back(stranger);
  await_greeting(stranger);
  return true;
}

// The caller holds the lock.
void Listener::await_greeting(const StrangerPtr& stranger) {
  const auto end = EventLoop::Clock::now() + options_.greeting_timeout;
  stranger->deadline = loop_.call_at(end, [this, stranger, end] {
    greet(stranger);  // what has arrived was not read if nobody ran the loop
    if (EventLoop::Clock::now() < end + options_.greeting_timeout) return turn_away(stranger);
    // Nobody ran it for long, so the stranger had no turn; an encrypted greeting takes two.
    const std::lock_guard guard(lock_);
    if (std::ranges::find(strangers_, stranger) != strangers_.end()) await_greeting(stranger);
  });
}

// Reads the greeting; admits a member of the session, and ends what is none.
void Listener::greet(const StrangerPtr& stranger) {
  Stranger& it = *stranger;
  if (!it.stream) return;
  if (const auto result = it.stream->negotiate(); result != Negotiation::kDone) {
    if (result == Negotiation::kFailed) return turn_away(stranger);
    return loop_.change(it.watch, it.stream->has_unsent() ? EPOLLIN | EPOLLOUT : EPOLLIN);
  }
  if (options_.tls) loop_.change(it.watch, EPOLLIN);
  const Moved moved = it.stream->read(it.bytes.data() + it.size, it.bytes.size() - it.size);
  it.size += moved.size_bytes;
  if (it.size < it.bytes.size()) {
    if (moved.ended) remove(stranger);
    return;
  }
  Greeting greeting;
  std::memcpy(&greeting, it.bytes.data(), sizeof greeting);
  if (greeting.magic != kMagic || !equal(greeting.token, options_.token)) {
    turn_away(stranger);
    return;
  }
  if (!remove(stranger)) return;
  if (!admit_(std::exchange(it.stream, nullptr), greeting)) count_stranger();
}

// A flood of connections must not keep a member out: it may have greeted by now.
void Listener::end_oldest() {
  StrangerPtr oldest;
  {
    const std::lock_guard guard(lock_);
    if (strangers_.empty()) return;
    oldest = strangers_.front();
  }
  greet(oldest);
  turn_away(oldest);
}

void Listener::turn_away(const StrangerPtr& stranger) {
  if (!remove(stranger)) return;
  stranger->stream.reset();
  count_stranger();
}

bool Listener::remove(const StrangerPtr& stranger) {
  {
    const std::lock_guard guard(lock_);
    if (std::erase(strangers_, stranger) == 0) return false;
  }
  loop_.forget(stranger->watch);
  loop_.forget(stranger->deadline);
  return true;
}

void Listener::count_stranger() const {
  if (options_.turned_away != nullptr) options_.turned_away->fetch_add(1, std::memory_order_relaxed);
}

}  // namespace torchrelay::net
