#include "net/event_loop.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <new>

#include "core/error.h"

namespace torchrelay::net {
namespace {

constexpr EventLoop::Id kWake = 0;
constexpr std::chrono::milliseconds kRetry{10};  // of a function for which there was no memory

// An end of the connection is always reported. To report it once, a watch without events is edge-triggered.
epoll_event event_of(EventLoop::Id id, std::uint32_t events) {
  epoll_event event{};
  event.events = events != 0 ? events : static_cast<std::uint32_t>(EPOLLET);
  event.data.u64 = id;
  return event;
}

}  // namespace

std::shared_ptr<EventLoop> EventLoop::shared() {
  static std::mutex& lock = *new std::mutex;  // used until the process ends
  static std::weak_ptr<EventLoop>& current = *new std::weak_ptr<EventLoop>;
  const std::lock_guard guard(lock);
  auto loop = current.lock();
  if (!loop || loop->origin_.is_forked()) current = loop = std::make_shared<EventLoop>();
  return loop;
}

EventLoop::EventLoop(Driver driver)
    : poller_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  epoll_event event = event_of(kWake, EPOLLIN);
  if (!poller_ || !wake_ || epoll_ctl(poller_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0)
    throw Error(Code::kUnavailable, with_errno("making an event loop"));
  if (driver == Driver::kOwnThread) thread_ = start_thread([this] { run(); });
}

EventLoop::~EventLoop() {
  if (!thread_.joinable()) return;
  if (origin_.is_forked()) {
    thread_.detach();
    return;
  }
  {
    const std::lock_guard guard(lock_);
    stopping_ = true;
  }
  wake();
  thread_.join();
}

EventLoop::Id EventLoop::watch(int fd, std::uint32_t events, Ready ready) {
  const std::lock_guard guard(lock_);
  const Id id = ++last_id_;
  epoll_event event = event_of(id, events);
  if (epoll_ctl(poller_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    throw Error(Code::kUnavailable, with_errno("watching a connection"));
  watches_[id] = {fd, std::make_shared<Ready>(std::move(ready))};
  return id;
}

void EventLoop::change(Id id, std::uint32_t events) {
  const std::lock_guard guard(lock_);
  const auto found = watches_.find(id);
  if (found == watches_.end()) return;
  epoll_event event = event_of(id, events);
  epoll_ctl(poller_.get(), EPOLL_CTL_MOD, found->second.fd, &event);
}

EventLoop::Id EventLoop::call_at(Clock::time_point when, std::function<void()> function) {
  Id id;
  bool is_first;
  {
    const std::lock_guard guard(lock_);
    id = ++last_id_;
    calls_.emplace(When{when, id}, std::move(function));
    is_first = calls_.begin()->first.second == id;
  }
  if (is_first) wake();
  return id;
}

void EventLoop::forget(Id id) {
  std::unique_lock guard(lock_);
  if (const auto found = watches_.find(id); found != watches_.end()) {
    epoll_ctl(poller_.get(), EPOLL_CTL_DEL, found->second.fd, nullptr);
    watches_.erase(found);
  } else {
    std::erase_if(calls_, [&](const auto& each) { return each.first.second == id; });
  }
  if (current_ == id) current_is_forgotten_ = true;
  if (is_running_here()) return;
  changed_.wait(guard, [&] { return current_ != id || id == 0; });
}

void EventLoop::finish_running() {
  std::unique_lock guard(lock_);
  if (is_running_here()) return;
  const auto made = calls_made_;
  changed_.wait(guard, [&] { return current_ == 0 || calls_made_ != made; });
}

void EventLoop::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
}

// False: there was no memory for it, which another thread may free; it is still wanted.
template <class Function>
bool EventLoop::call(std::unique_lock<std::mutex>& guard, Id id, const Function& function) {
  current_ = id;
  current_is_forgotten_ = false;
  bool is_done = true;
  guard.unlock();
  try {
    function();
  } catch (const std::bad_alloc&) {
    is_done = false;
    std::this_thread::sleep_for(kRetry);
  }
  guard.lock();
  current_ = 0;
  ++calls_made_;
  changed_.notify_all();
  return is_done || current_is_forgotten_;
}

void EventLoop::call_ready(Id id, std::uint32_t events) {
  std::unique_lock guard(lock_);
  const auto found = watches_.find(id);
  if (found == watches_.end()) return;
  const auto ready = found->second.ready;
  call(guard, id, [&] { (*ready)(events); });
}

// Calls what is due; returns the time until the next call, nothing if there is none.
std::optional<EventLoop::Clock::duration> EventLoop::call_due() {
  std::unique_lock guard(lock_);
  for (;;) {
    if (stopping_) return Clock::duration(0);
    if (calls_.empty()) return std::nullopt;
    const auto left = calls_.begin()->first.first - Clock::now();
    if (left.count() > 0) return left;
    auto node = calls_.extract(calls_.begin());
    if (call(guard, node.key().second, node.mapped())) continue;
    node.key().first = Clock::now();
    calls_.insert(std::move(node));
  }
}

void EventLoop::dispatch(int timeout_ms) {
  std::array<epoll_event, 64> events;
  const int count = epoll_wait(poller_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    if (event.data.u64 != kWake) {
      call_ready(event.data.u64, event.events);
      continue;
    }
    std::uint64_t value;
    [[maybe_unused]] const auto got = ::read(wake_.get(), &value, sizeof value);
  }
}

void EventLoop::run() {
  {
    const std::lock_guard guard(lock_);
    runner_ = std::this_thread::get_id();
  }
  for (;;) {
    const auto left = call_due();
    {
      const std::lock_guard guard(lock_);
      if (stopping_) return;
    }
    dispatch(left ? static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(*left).count()) : -1);
  }
}

void EventLoop::run_for(std::chrono::nanoseconds longest) {
  {
    const std::lock_guard guard(lock_);
    runner_ = std::this_thread::get_id();
  }
  const auto left = call_due();
  if (left) longest = std::min<std::chrono::nanoseconds>(longest, *left);
  if (longest.count() > 0) {
    const auto seconds = std::chrono::floor<std::chrono::seconds>(longest);
    const timespec pause{seconds.count(), (longest - seconds).count()};
    pollfd item{poller_.get(), POLLIN, 0};  // epoll_wait counts in milliseconds
    ppoll(&item, 1, &pause, nullptr);
  }
  dispatch(0);
  const std::lock_guard guard(lock_);
  runner_ = {};
}

}  // namespace torchrelay::net
