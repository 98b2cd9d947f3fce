// Waits for the file descriptors and the times of connections (epoll): in one thread for all of a process, or
// in the thread of who needs what arrives, which saves a change of threads.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>

#include "core/origin.h"
#include "net/descriptor.h"

namespace torchrelay::net {

// Thread-safe. Functions run in the loop's thread, one at a time; they must not block, nor throw anything but
// std::bad_alloc, after which they are called again.
class EventLoop {
 public:
  using Clock = std::chrono::steady_clock;
  using Id = std::uint64_t;  // of what is waited for; 0 is none
  using Ready = std::function<void(std::uint32_t events)>;

  enum class Driver { kOwnThread, kCaller };

  // The loop of this process; it ends when nobody holds it. A forked child gets one of its own.
  static std::shared_ptr<EventLoop> shared();

  explicit EventLoop(Driver driver = Driver::kOwnThread);
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Calls `ready` whenever the descriptor, which must stay open until forget(), has one of `events` (EPOLLIN,
  // ...), an error, or was closed at the other end. Without events only once.
  Id watch(int fd, std::uint32_t events, Ready ready);
  void change(Id id, std::uint32_t events);

  Id call_at(Clock::time_point when, std::function<void()> function);

  // Ends a watch or a call; neither is in progress when it returns, unless it is the caller. The caller must
  // not hold a lock that the function takes.
  void forget(Id id);

  // Waits for the function that is running, unless it is the caller: one may forget itself.
  void finish_running();

  // With Driver::kCaller: waits up to `longest` for something to happen and calls what it is for, in this
  // thread. Called by one thread at a time.
  void run_for(std::chrono::nanoseconds longest);

 private:
  struct Watch {
    int fd;
    std::shared_ptr<Ready> ready;
  };
  using When = std::pair<Clock::time_point, Id>;

  void run();
  void dispatch(int timeout_ms);
  void call_ready(Id id, std::uint32_t events);
  std::optional<Clock::duration> call_due();
  bool is_running_here() const { return std::this_thread::get_id() == runner_; }
  template <class Function>
  bool call(std::unique_lock<std::mutex>& guard, Id id, const Function& function);
  void wake();

  Descriptor poller_, wake_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::unordered_map<Id, Watch> watches_;
  std::map<When, std::function<void()>> calls_;
  Id last_id_ = 0;
  Id current_ = 0;  // whose function runs
  bool current_is_forgotten_ = false;
  std::uint64_t calls_made_ = 0;
  bool stopping_ = false;
  std::thread::id runner_;
  Origin origin_;
  std::thread thread_;
};

}  // namespace torchrelay::net
