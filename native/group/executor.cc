#include "group/executor.h"

#include <algorithm>

#include "core/error.h"

namespace torchrelay {
namespace {

constexpr std::chrono::milliseconds kSlice{50};

}  // namespace

Error destroyed() {
  return {Code::kPeerLost, "the group was destroyed on this rank before the operation ended"};
}

bool Ticket::wait(std::chrono::nanoseconds timeout, const std::function<void()>& poll) const {
  const auto end = std::chrono::steady_clock::now() + timeout;
  std::unique_lock guard(lock_);
  while (!changed_.wait_until(guard, std::min(end, std::chrono::steady_clock::now() + kSlice),
                              [this] { return done(); })) {
    if (std::chrono::steady_clock::now() >= end) return false;
    if (!poll) continue;
    guard.unlock();
    poll();
    guard.lock();
  }
  if (error_) std::rethrow_exception(error_);
  return true;
}

std::exception_ptr Ticket::error() const {
  const std::lock_guard guard(lock_);
  return error_;
}

void Ticket::when_done(std::function<void()> then) {
  {
    const std::lock_guard guard(lock_);
    if (!done()) {
      then_.push_back(std::move(then));
      return;
    }
  }
  then();
}

void Ticket::finish(std::exception_ptr error) {
  std::vector<std::function<void()>> then;
  {
    const std::lock_guard guard(lock_);
    if (done()) return;
    error_ = std::move(error);
    done_.store(true, std::memory_order_release);
    then.swap(then_);
    changed_.notify_all();
  }
  for (auto& call : then) call();
}

Executor::Executor() : thread_(start_thread([this] { loop(); })) {}

std::shared_ptr<Ticket> Executor::submit(Job job) {
  auto ticket = std::make_shared<Ticket>();
  {
    const std::lock_guard guard(lock_);
    admit();
    queue_.emplace_back(std::move(job), ticket);
  }
  changed_.notify_all();
  return ticket;
}

bool Executor::busy() {
  const std::lock_guard guard(lock_);
  return is_running() || !queue_.empty();
}

// With the lock.
void Executor::admit() const {
  if (stopping()) throw destroyed();
  if (runner_ == std::this_thread::get_id())
    throw Error(Code::kUnavailable,
                "a signal handler made this call while its thread was in another one of the same group; set "
                "a flag in the handler, and make the call after that one");
}

bool Executor::take_turn() {
  const std::lock_guard guard(lock_);
  admit();
  if (is_running() || !queue_.empty()) return false;
  runner_ = std::this_thread::get_id();
  return true;
}

void Executor::end_turn() {
  bool more;
  {
    const std::lock_guard guard(lock_);
    runner_ = {};
    more = !queue_.empty() || stopping();
  }
  if (more) changed_.notify_all();
}

void Executor::loop() {
  std::unique_lock guard(lock_);
  for (;;) {
    changed_.wait(guard, [this] { return stopping() || (!is_running() && !queue_.empty()); });
    if (stopping()) return;
    auto [job, ticket] = std::move(queue_.front());
    queue_.pop_front();
    runner_ = std::this_thread::get_id();
    guard.unlock();
    std::exception_ptr error;
    try {
      job(true);
    } catch (...) {
      error = std::current_exception();
    }
    job = nullptr;
    // The turn ends before the ticket is done, so that its waiters find the executor free.
    guard.lock();
    runner_ = {};
    guard.unlock();
    ticket->finish(error);
    guard.lock();
  }
}

void Executor::stop() {
  std::deque<std::pair<Job, std::shared_ptr<Ticket>>> left;
  {
    const std::lock_guard guard(lock_);
    stopping_.store(true, std::memory_order_release);
    left.swap(queue_);
    changed_.notify_all();
  }
  for (auto& entry : left) entry.second->finish(std::make_exception_ptr(destroyed()));
  if (thread_.joinable()) thread_.join();
  std::unique_lock guard(lock_);
  changed_.wait(guard, [this] { return !is_running() || runner_ == std::this_thread::get_id(); });
}

}  // namespace torchrelay
