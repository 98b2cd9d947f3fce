// Runs a group's operations in the order they were given, in a thread of its own or, if nothing is waiting,
// in the caller's.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace torchrelay {

class Error;

// What fails operations of a group that is destroyed before they end.
Error destroyed();

// The completion of one operation. Thread-safe.
class Ticket {
 public:
  bool done() const noexcept { return done_.load(std::memory_order_acquire); }

  // Waits up to timeout; false if it is still not done. Throws what the operation threw. `poll` is called
  // about 20 times a second and may throw to stop waiting; the operation goes on.
  bool wait(std::chrono::nanoseconds timeout, const std::function<void()>& poll) const;

  // What the operation threw, or null.
  std::exception_ptr error() const;

  // Calls `then` once the operation is done, in the thread that ends it; at once if it is done.
  void when_done(std::function<void()> then);

  // Only the first call counts.
  void finish(std::exception_ptr error);

 private:
  mutable std::mutex lock_;
  mutable std::condition_variable changed_;
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
  std::vector<std::function<void()>> then_;
};

class Executor {
 public:
  // A job blocks until its operation is done; `in_background`: it runs in the executor's thread.
  using Job = std::function<void(bool in_background)>;

  // Starts the thread: at the first job, one rank alone could lack it.
  Executor();
  ~Executor() { stop(); }
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Queues the job. This and try_run() throw kUnavailable in a thread that
  // runs a job, as in a signal handler: its jobs would wait for that one.
  std::shared_ptr<Ticket> submit(Job job);

  // Runs the job here and throws what it throws, if nothing is queued or running; else returns false.
  template <class Function>
  bool try_run(Function&& job) {
    if (!take_turn()) return false;
    const Turn turn(*this);
    job();
    return true;
  }

  // Whether a job is queued or running.
  bool busy();

  // Whether running jobs should stop.
  bool stopping() const noexcept { return stopping_.load(std::memory_order_acquire); }

  // Fails what is queued, ends the thread, and waits for what is running, which must watch stopping(), unless
  // it runs in this thread.
  void stop();

 private:
  struct Turn {
    explicit Turn(Executor& executor) : executor_(executor) {}
    ~Turn() { executor_.end_turn(); }
    Executor& executor_;
  };

  void admit() const;
  bool is_running() const { return runner_ != std::thread::id{}; }
  bool take_turn();
  void end_turn();
  void loop();

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::pair<Job, std::shared_ptr<Ticket>>> queue_;
  std::thread::id runner_;  // the thread that runs a job
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace torchrelay
