#include "net/outbound.h"

#include <sys/epoll.h>

#include <array>
#include <cerrno>
#include <utility>

namespace torchrelay::net {
namespace {

constexpr std::chrono::milliseconds kReconnect{100};  // between two attempts to connect

}  // namespace

void Outbound::send(Message message) {
  const std::lock_guard guard(lock_);
  const bool was_idle = backlog_.empty();
  const Frame frame{.size_bytes = message.size_bytes()};
  backlog_.push_back({frame, std::move(message)});
  if (was_idle) flush();
}

bool Outbound::is_refused() const {
  const std::lock_guard guard(lock_);
  return is_refused_;
}

bool Outbound::is_done() const {
  const std::lock_guard guard(lock_);
  return backlog_.empty() || Clock::now() >= deadline_;
}

void Outbound::close(Clock::time_point deadline) {
  const std::lock_guard guard(lock_);
  deadline_ = deadline;
}

void Outbound::end() {
  std::array<EventLoop::Id, 2> ids;
  {
    std::unique_lock guard(lock_);
    idle_.wait_until(guard, deadline_, [this] { return backlog_.empty(); });
    backlog_.clear();
    deadline_ = Clock::time_point::min();
    ids = {watch_, timer_};
  }
  for (const auto id : ids)
    if (id != 0) loop_.forget(id);
}

bool Outbound::connect() {
  if (stream_) return is_connected_;
  if (timer_ != 0) return false;
  stream_ = connect_();
  if (!stream_) {
    is_refused_ = errno == ECONNREFUSED;
    retry_later();
    return false;
  }
  is_connected_ = write_ended_ = false;
  wants_space_ = true;
  greeted_ = 0;
  watch_ = loop_.watch(stream_->fd(), EPOLLIN | EPOLLOUT, [weak = weak_from_this()](std::uint32_t events) {
    if (const auto self = weak.lock()) self->ready(events);
  });
  return false;
}

void Outbound::flush() {
  if (Clock::now() >= deadline_) backlog_.clear();
  if (!backlog_.empty() && !connect()) return;
  bool is_blocked = false;
  while (!is_blocked && !backlog_.empty()) {
    Outgoing& next = backlog_.front();
    Written written = write_rest(*stream_, {bytes_of(greeting_)}, greeted_);
    if (written.is_complete)
      written = write_rest(*stream_, {bytes_of(next.frame), {next.message.data(), next.message.size_bytes()}},
                           next.sent);
    is_blocked = !written.is_complete;
    write_ended_ |= written.ended;
    if (written.is_complete) backlog_.pop_front();
  }
  if (backlog_.empty()) idle_.notify_all();
  // Where the stream has ended, this makes the loop look at it.
  if (stream_) watch_for_space(is_blocked);
}

void Outbound::watch_for_space(bool wanted) {
  if (std::exchange(wants_space_, wanted) == wanted && !write_ended_) return;
  loop_.change(watch_, wanted ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

void Outbound::retry_later() {
  timer_ = loop_.call_at(Clock::now() + kReconnect, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->resume();
  });
}

void Outbound::resume() {
  const std::lock_guard guard(lock_);
  timer_ = 0;
  flush();
}

// The receiver sends nothing: what can be read is the end.
void Outbound::ready(std::uint32_t events) {
  const std::lock_guard guard(lock_);
  if (!stream_ || deadline_ == Clock::time_point::min()) return;
  if (!is_connected_) {
    const int error = connect_error(stream_->fd());
    is_refused_ = error == ECONNREFUSED;
    if (error != 0) return disconnect();
    const Negotiation result = stream_->negotiate();
    if (result == Negotiation::kFailed) return disconnect();
    is_connected_ = result == Negotiation::kDone;
    if (!is_connected_) return watch_for_space(stream_->has_unsent());
  }
  std::array<std::byte, 64> nothing;
  const bool may_have_ended = (events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0;
  if (write_ended_ || (may_have_ended && stream_->read(nothing.data(), nothing.size()).ended))
    return disconnect();
  flush();
}

// In the loop's thread.
void Outbound::disconnect() {
  loop_.forget(std::exchange(watch_, 0));
  stream_.reset();
  if (backlog_.empty()) return;
  if (backlog_.front().sent != 0) backlog_.pop_front();
  if (backlog_.empty())
    idle_.notify_all();
  else
    retry_later();
}

}  // namespace torchrelay::net
