// The connection by which an endpoint of tcp_network.cc sends to one address.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "net/endpoint.h"
#include "net/event_loop.h"
#include "net/frames.h"

namespace torchrelay::net {

// Connects when there is something to send, and again when a connection broke: what was sent in part is lost.
// The thread that sends writes what the socket accepts; the event loop does the rest, in order. Thread-safe.
class Outbound : public std::enable_shared_from_this<Outbound> {
 public:
  using Clock = EventLoop::Clock;
  // A stream whose socket is being connected; null, with errno set, if that failed at once.
  using Connect = std::function<std::unique_ptr<Stream>()>;

  // The loop must outlive it.
  Outbound(EventLoop& loop, Connect connect, const Greeting& greeting)
      : loop_(loop), connect_(std::move(connect)), greeting_(greeting) {}

  // Never blocks.
  void send(Message message);
  // Whether the last attempt to connect was refused.
  bool is_refused() const;
  // No more is sent; what has been is given up at `deadline`.
  void close(Clock::time_point deadline);
  // Whether all is sent, or given up.
  bool is_done() const;
  // Waits until all is sent, at most until the deadline, and disconnects.
  void end();

 private:
  struct Outgoing {
    Frame frame;
    Message message;
    std::size_t sent = 0;  // of both
  };
  // With the lock.
  bool connect();
  void flush();
  void watch_for_space(bool wanted);
  void retry_later();
  void disconnect();

  void ready(std::uint32_t events);
  void resume();

  EventLoop& loop_;
  const Connect connect_;
  const Greeting greeting_;
  mutable std::mutex lock_;  // of what follows
  std::condition_variable idle_;
  std::unique_ptr<Stream> stream_;
  EventLoop::Id watch_ = 0, timer_ = 0;
  bool is_connected_ = false;  // and negotiated
  bool is_refused_ = false;
  bool wants_space_ = false;
  bool write_ended_ = false;
  std::size_t greeted_ = 0;
  std::deque<Outgoing> backlog_;
  Clock::time_point deadline_ = Clock::time_point::max();
};

}  // namespace torchrelay::net
