// Messages of one rank of a group with ranks of other hosts, over TCP.
//
// Every rank listens. Two ranks are connected when one of them first sends to the other, or waits for it;
// each sends over the first connection that it has: a greeting, then frames in the order in which they were
// sent (frames.h). With a key, all of it is encrypted (tls.h).
//
// A frame is received straight into the memory of the receive that it matches by source and tag. Without one
// a small frame is parked in memory, up to a limit, and a large one waits in the socket, unless it blocks one
// that is waited for. The sender's thread writes as many bytes as the socket accepts; the event loop does the
// rest, and reads.
//
// The first failure counts: what is in progress fails, and ranks of other hosts receive the cause.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/error.h"
#include "group/matcher.h"
#include "net/event_loop.h"
#include "net/listener.h"
#include "net/session.h"

namespace torchrelay {

struct MessengerOptions {
  int rank = 0;
  std::vector<int> names;               // the ranks as users know them
  std::vector<net::Address> addresses;  // where each rank listens
  std::vector<std::vector<int>> hosts;  // the ranks of each host; its first is its leader
  SessionToken token{};
  std::shared_ptr<const net::Tls> tls{};  // null: connections are not encrypted

  std::size_t small_bytes = std::size_t{64} << 10;   // up to this a frame may be parked
  std::size_t parked_bytes = std::size_t{16} << 20;  // of each peer
  std::size_t max_strangers = 64;
  std::chrono::milliseconds greeting_timeout{5000};
  std::chrono::milliseconds connect_timeout{10000};
  std::chrono::milliseconds reconnect{500};  // how long a peer without a connection may make another
  std::chrono::milliseconds flush_timeout{2000};
  std::chrono::milliseconds last_report_timeout{250};  // to a rank that may never read it
  std::chrono::milliseconds probe_timeout{500};        // to see whether a rank is reachable
  std::chrono::milliseconds report_timeout{500};       // for the report of who knows a cause
  std::chrono::milliseconds sweep_period{1000};        // of the search for late transfers
};

// Thread-safe. In a forked child it must not be used, nor destroyed.
class Messenger {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::hours kNoTimeout{24 * 365 * 30};
  // Receives the bytes of a message from a rank of this host, which are in shared memory; ends in time.
  using ReceiveLocally = std::function<std::shared_ptr<Transfer>(
      Block, int source, std::int64_t local_tag, std::uint8_t code, std::chrono::nanoseconds timeout)>;

  // Owns the listening socket. `on_failure` is called once, when the group breaks here or a peer reports that
  // it broke, in any thread; it must not call close().
  Messenger(MessengerOptions options, Descriptor listener, ReceiveLocally receive_locally,
            std::function<void(const Error&)> on_failure);
  ~Messenger();
  Messenger(const Messenger&) = delete;
  Messenger& operator=(const Messenger&) = delete;

  // Neither blocks. A transfer fails with kMismatch if the sizes or types differ, with kPeerLost if the peer
  // is lost or has left, with the group's failure, and with kTimeout if it is late; if nobody waits for it,
  // up to sweep_period later.
  std::shared_ptr<Transfer> send(Block data, int to, std::int64_t tag, std::uint8_t code,
                                 std::chrono::nanoseconds timeout);
  std::shared_ptr<Transfer> receive(Block data, int source, std::int64_t tag, std::uint8_t code,
                                    std::chrono::nanoseconds timeout);

  // Announces a message whose bytes are in shared memory; null: this rank sends it to itself.
  std::shared_ptr<Transfer> announce(Block data, int to, std::int64_t tag, std::uint8_t code,
                                     std::int32_t local_tag);

  // Waits for one transfer, and throws what it failed with. False: not done within `timeout`. `poll` is
  // called about 20 times a second; throws to stop waiting.
  bool wait(const std::shared_ptr<Transfer>& transfer, std::chrono::nanoseconds timeout,
            const std::function<void()>& poll);

  // Waits for a transfer of a collective until `deadline`. Throws kTimeout or kPeerLost that name its peer,
  // and what poll throws; the transfer may then be in progress until fail().
  void complete(const std::shared_ptr<Transfer>& transfer, const char* operation, Clock::time_point deadline,
                const std::function<void()>& poll);

  // The error for the first of `ranks` whose connection ended without a farewell. Blocks if there is one. A
  // rank that has left is not lost: it has finished.
  std::optional<Error> lost(const std::vector<int>& ranks);

  // Adds the ranks that share a lost rank's host and cannot be reached either, unless a cause has been or is
  // being reported. Blocks.
  Error with_host(const Error& error, int peer);

  // Breaks the group; returns the failure that counts: the first. When it returns, no memory of a transfer
  // is in use.
  Error fail(const Error& error);
  std::optional<Error> failure() const;

  // Sends what is queued for at most flush_timeout, which began when the group broke, and to those because of
  // which it broke for last_report_timeout; takes leave of all peers, and disconnects. Idempotent.
  void close();

  std::uint64_t sent_bytes() const noexcept { return sent_bytes_.load(std::memory_order_relaxed); }
  std::uint64_t received_bytes() const noexcept { return received_bytes_.load(std::memory_order_relaxed); }
  // In complete().
  std::uint64_t waited_ns() const noexcept { return waited_ns_.load(std::memory_order_relaxed); }

 private:
  struct Outgoing;
  struct Connection;
  using ConnectionPtr = std::shared_ptr<Connection>;
  using Parked = Matcher<net::Frame>::Parked;
  struct Peer;
  struct Consequences;
  class Incoming;

  std::shared_ptr<Transfer> post(net::Frame frame, Block data, int to, std::chrono::nanoseconds timeout);
  void queue(int to, const net::Frame& frame, std::vector<std::byte> body);
  bool flush(Peer& peer, std::vector<std::shared_ptr<Transfer>>& sent);
  void flush_to(int rank);
  static bool write(Connection& connection, std::initializer_list<std::span<const std::byte>> parts,
                    std::size_t& sent);
  bool greet(Connection& connection);
  void abandon(Peer& peer, const std::function<bool(const Transfer&)>& which,
               std::vector<std::shared_ptr<Transfer>>& abandoned);
  void expire(const std::shared_ptr<Transfer>& transfer);
  void sweep();

  // Connections; called with the lock.
  void connect(int to);
  void unreachable(int rank, int error);
  void drop(const ConnectionPtr& connection);
  ConnectionPtr start(std::unique_ptr<net::Stream> stream, int rank, bool connecting);
  ConnectionPtr start_to(int rank, Descriptor socket);
  void admit(const ConnectionPtr& connection, int rank, Consequences& then);
  void end(const ConnectionPtr& connection, Consequences& then);
  void await_another(int rank, const std::string& reason, const std::optional<Error>& own,
                     std::chrono::milliseconds delay, int turns = 1);
  void lose(int rank, const std::string& reason, Consequences& then);
  void send_report(int to, const std::vector<std::byte>& body);
  void end_report(const ConnectionPtr& connection);
  void call_after(std::chrono::milliseconds delay, net::EventLoop::Id& id, std::function<void()> function);
  void sweep_later();
  void forget(net::EventLoop::Id& id);

  // In the event loop's thread.
  bool accept(std::unique_ptr<net::Stream> stream, const net::Greeting& greeting);
  void ready(const ConnectionPtr& connection, std::uint32_t events);
  void read(const ConnectionPtr& connection, Consequences& then);
  bool open_frame(const ConnectionPtr& connection, const net::Frame& frame, Consequences& then);
  void close_frame(const ConnectionPtr& connection, Consequences& then);

  // Receives; called with the lock.
  void announced(int source, const net::Frame& frame, Consequences& then);
  void deliver(const std::shared_ptr<Transfer>& transfer, const Parked& message, Consequences& then);
  void resume(const ConnectionPtr& connection);
  void read_soon(const ConnectionPtr& connection);

  void settle(Consequences& then);
  void receive_local(const std::shared_ptr<Transfer>& transfer, int source, const net::Frame& frame);
  void watch_for(Connection& connection);
  int name_of(int rank) const { return options_.names[static_cast<std::size_t>(rank)]; }
  Peer& peer_of(int rank) const { return *peers_[static_cast<std::size_t>(rank)]; }
  void require_rank(const char* operation, int rank) const;
  std::exception_ptr refusal(int rank) const;
  Error gone_error(int rank) const;
  void lack_a_descriptor(int error);
  // This rank lacks what it needs for `what`.
  Error lacking(const std::string& what, int error) const;

  const MessengerOptions options_;
  const ReceiveLocally receive_locally_;
  const std::function<void(const Error&)> on_failure_;
  const std::shared_ptr<net::EventLoop> loop_;
  const net::Greeting greeting_;
  const std::vector<std::unique_ptr<Peer>> peers_;
  Descriptor spare_;  // for a connection or a report where the process has no other descriptor

  mutable std::mutex lock_;  // of what follows; before a peer's
  std::condition_variable changed_;
  std::set<ConnectionPtr> connections_;
  Matcher<net::Frame> matcher_;
  std::set<net::EventLoop::Id> timers_;
  std::optional<Error> failure_;
  Clock::time_point failed_at_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> closed_{false};
  std::atomic<std::uint64_t> sent_bytes_{0}, received_bytes_{0}, waited_ns_{0};
  net::Listener listener_;
};

}  // namespace torchrelay
