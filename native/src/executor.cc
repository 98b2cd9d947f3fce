#include "torchrelay/executor.h"

#include <algorithm>

#include "torchrelay/error.h"

namespace torchrelay {
namespace {

constexpr std::chrono::milliseconds kSlice{50};

Error stopped() {
  return {Code::kPeerLost, "the group was destroyed on this rank before the operation ended"};
}

}  // namespace

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

std::shared_ptr<Ticket> Executor::submit(Job job) {
  auto ticket = std::make_shared<Ticket>();
  {
    const std::lock_guard guard(lock_);
    if (stopping()) throw stopped();
    if (!thread_.joinable()) {
      thread_ = std::thread([this] { loop(); });
    }
    queue_.emplace_back(std::move(job), ticket);
  }
  changed_.notify_all();
  return ticket;
}

bool Executor::busy() {
  const std::lock_guard guard(lock_);
  return running_ || !queue_.empty();
}

bool Executor::take_turn() {
  const std::lock_guard guard(lock_);
  if (stopping()) throw stopped();
  if (running_ || !queue_.empty()) return false;
  running_ = true;
  return true;
}

void Executor::end_turn() {
  bool more;
  {
    const std::lock_guard guard(lock_);
    running_ = false;
    more = !queue_.empty() || stopping();
  }
  if (more) changed_.notify_all();
}

void Executor::loop() {
  std::unique_lock guard(lock_);
  for (;;) {
    changed_.wait(guard, [this] { return stopping() || (!running_ && !queue_.empty()); });
    if (stopping()) return;
    auto [job, ticket] = std::move(queue_.front());
    queue_.pop_front();
    running_ = true;
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
    running_ = false;
    guard.unlock();
    ticket->finish(error);
    guard.lock();
  }
}

void Executor::stop() {
  std::deque<std::pair<Job, std::shared_ptr<Ticket>>> left;
  {
    std::unique_lock guard(lock_);
    stopping_.store(true, std::memory_order_release);
    left.swap(queue_);
    changed_.notify_all();
    if (!thread_.joinable()) changed_.wait(guard, [this] { return !running_; });
  }
  for (auto& entry : left) entry.second->finish(std::make_exception_ptr(stopped()));
  if (thread_.joinable()) thread_.join();
  std::unique_lock guard(lock_);
  changed_.wait(guard, [this] { return !running_; });
}

}  // namespace torchrelay
