// A listening socket, whose connections are strangers until they have greeted with the session's token. Their
// number and the time of each are bounded.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "net/event_loop.h"
#include "net/frames.h"
#include "net/tls.h"

namespace torchrelay::net {

struct ListenerOptions {
  SessionToken token{};
  std::shared_ptr<const Tls> tls{};  // null: connections are not encrypted
  std::string name{};                // of this process, which connections ask for in TLS
  std::size_t max_strangers = 64;
  std::chrono::milliseconds greeting_timeout{5000};
  std::atomic<std::uint64_t>* turned_away = nullptr;  // counts strangers
  // Called in the loop's thread where connections could not be accepted for a while; with errno.
  std::function<void(int)> starved{};
};

// In a forked child it must not be used, nor destroyed.
class Listener {
 public:
  // Gets a connection of the session. False: it is not wanted. Called in the loop's thread, and may be called
  // until close() returns.
  using Admit = std::function<bool(std::unique_ptr<Stream> stream, const Greeting& greeting)>;

  Listener(EventLoop& loop, Descriptor socket, ListenerOptions options, Admit admit);
  ~Listener() { close(); }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Idempotent. The caller must not hold a lock that `admit` takes.
  void close();

 private:
  struct Stranger;
  using StrangerPtr = std::shared_ptr<Stranger>;

  // In the loop's thread.
  void accept_all();
  bool add(Descriptor socket);
  void await_greeting(const StrangerPtr& stranger);
  void greet(const StrangerPtr& stranger);
  void turn_away(const StrangerPtr& stranger);
  void end_oldest();
  bool remove(const StrangerPtr& stranger);
  void count_stranger() const;

  EventLoop& loop_;
  const ListenerOptions options_;
  const Admit admit_;
  std::mutex lock_;  // of what follows
  Descriptor socket_;
  Descriptor spare_;  // given up for a connection where the process has no other descriptor
  std::optional<EventLoop::Clock::time_point> starved_;  // when it counts as such, if nothing is accepted
  EventLoop::Id watch_ = 0, retry_ = 0;
  std::deque<StrangerPtr> strangers_;  // in the order in which they came
  bool closed_ = false;
};

}  // namespace torchrelay::net
