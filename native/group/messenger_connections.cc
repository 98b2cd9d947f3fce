#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "group/messenger_parts.h"

namespace torchrelay {
namespace {

constexpr std::size_t kReadBudget = std::size_t{2} << 20;  // of one connection before the others' turn
constexpr std::size_t kMaxReport = std::size_t{64} << 10;
// What a peer sent before it ended may be in a connection that has yet to be accepted, if it takes a retry.
constexpr int kLastTurns = 6;
constexpr std::chrono::milliseconds kLastTurn{20};

std::string cannot_be_reached(int error) {
  return "cannot be reached (" + std::string(std::strerror(error)) + ")";
}

}  // namespace

// --- writing

// Writes what the socket accepts; true when all is written.
bool Messenger::write(Connection& connection, std::initializer_list<std::span<const std::byte>> parts,
                      std::size_t& sent) {
  const net::Written written = net::write_rest(*connection.stream, parts, sent);
  if (written.ended) connection.write_ended = true;  // the loop sees it too, after what can still be read
  return written.is_complete;
}

// The first bytes of a connection that this end made; true when all are written.
bool Messenger::greet(Connection& connection) {
  return !connection.greets ||
         write(connection, {net::bytes_of(greeting_), connection.body}, connection.greeted);
}

// Called with the peer's lock. Moves transfers that were sent to `sent`.
bool Messenger::flush(Peer& peer, std::vector<std::shared_ptr<Transfer>>& sent) {
  if (!peer.out || peer.out->write_ended) return false;
  Connection& out = *peer.out;
  bool blocked = !greet(out);
  while (!blocked && !peer.queue.empty()) {
    Outgoing& next = peer.queue.front();
    blocked = !write(out, {net::bytes_of(next.frame), next.body, {next.data.data, next.data.size_bytes}},
                     next.sent);
    out.has_frames |= next.sent != 0;
    if (blocked) break;
    if (peer.queue.front().transfer) sent.push_back(std::move(peer.queue.front().transfer));
    peer.queue.pop_front();
  }
  if (peer.queue.empty() || out.write_ended) peer.idle.notify_all();
  if (out.wants_write.exchange(blocked) != blocked) watch_for(out);
  return blocked;
}

void Messenger::flush_to(int rank) {
  Peer& peer = peer_of(rank);
  std::vector<std::shared_ptr<Transfer>> sent;
  {
    const std::lock_guard guard(peer.lock);
    flush(peer, sent);
  }
  for (auto& each : sent) each->ticket().finish(nullptr);
}

void Messenger::watch_for(Connection& connection) {
  const std::lock_guard guard(connection.interest);
  std::uint32_t events = 0;
  if (!connection.paused) events |= EPOLLIN;
  if (connection.wants_write && !connection.write_ended) events |= EPOLLOUT;
  loop_->change(connection.watch, events);
}

// --- making and ending connections

Messenger::ConnectionPtr Messenger::start(std::unique_ptr<net::Stream> stream, int rank, bool connecting) {
  auto connection = std::make_shared<Connection>();
  connection->stream = std::move(stream);
  connection->rank = rank;
  if (connecting) connection->state = Connection::State::kConnecting;
  connection->greets = connecting;
  connection->watch = loop_->watch(connection->stream->fd(), connecting ? EPOLLOUT : EPOLLIN,
                                   [this, connection](std::uint32_t events) { ready(connection, events); });
  connections_.insert(connection);
  return connection;
}

Messenger::ConnectionPtr Messenger::start_to(int rank, Descriptor socket) {
  return start(net::open_stream(options_.tls.get(), std::move(socket), true, std::to_string(rank)), rank,
               true);
}

void Messenger::call_after(std::chrono::milliseconds delay, net::EventLoop::Id& id,
                           std::function<void()> function) {
  const auto known = std::make_shared<net::EventLoop::Id>();
  id = *known = loop_->call_at(Clock::now() + delay, [this, known, function = std::move(function)] {
    {
      const std::lock_guard guard(lock_);
      timers_.erase(*known);
    }
    function();
  });
  timers_.insert(id);
}

void Messenger::forget(net::EventLoop::Id& id) {
  if (id == 0) return;
  timers_.erase(id);
  loop_->forget(std::exchange(id, 0));
}

void Messenger::connect(int to) {
  Peer& peer = peer_of(to);
  if (!peer.connections.empty() || peer.connecting || peer.gone || failed_ || closed_) return;
  if (to == options_.rank) return;
  peer.connecting = true;
  const net::Address& address = options_.addresses[static_cast<std::size_t>(to)];
  Descriptor socket = net::start_connecting(address);
  if (!socket && spare_) {
    spare_.reset();
    socket = net::start_connecting(address);
  }
  if (!socket) return unreachable(to, errno);
  const auto connection = start_to(to, std::move(socket));
  const std::weak_ptr<Connection> weak = connection;
  call_after(options_.connect_timeout, connection->deadline, [this, weak, to] {
    const std::lock_guard guard(lock_);
    const auto late = weak.lock();
    if (!late || late->state != Connection::State::kConnecting) return;
    drop(late);
    unreachable(to, ETIMEDOUT);
  });
}

// A peer listens while it lives: one that had a connection and refuses another has ended.
void Messenger::unreachable(int rank, int error) {
  const Peer& peer = peer_of(rank);
  std::optional<Error> own;
  if (*remedy(error) != '\0') own = lacking("cannot connect to rank " + std::to_string(name_of(rank)), error);
  if (error == ECONNREFUSED && !peer.why_ended.empty())
    await_another(rank, peer.why_ended, own, kLastTurn, kLastTurns);
  else
    await_another(rank, cannot_be_reached(error), own, options_.reconnect);
}

// Removes a connection; its socket is closed when nobody uses it any more.
void Messenger::drop(const ConnectionPtr& connection) {
  if (connections_.erase(connection) == 0) return;
  loop_->forget(connection->watch);
  forget(connection->deadline);
}

// Loses a peer, or fails with an error of this rank's `own`, unless it makes another connection in some turns
// of the event loop, each after `delay`.
void Messenger::await_another(int rank, const std::string& reason, const std::optional<Error>& own,
                              std::chrono::milliseconds delay, int turns) {
  if (closed_) return;
  net::EventLoop::Id id = 0;
  call_after(delay, id, [this, rank, reason, own, delay, turns] {
    Consequences then;
    {
      const std::lock_guard guard(lock_);
      if (turns > 1) return await_another(rank, reason, own, delay, turns - 1);
      Peer& peer = peer_of(rank);
      peer.connecting = false;
      bool has_way;
      {
        const std::lock_guard peer_guard(peer.lock);
        has_way = connections_.contains(peer.out);
      }
      if (!has_way && own) then.failure = own;
      if (!has_way && !own) lose(rank, peer.left ? kLeft : reason, then);
    }
    settle(then);
  });
}

void Messenger::lose(int rank, const std::string& reason, Consequences& then) {
  Peer& peer = peer_of(rank);
  if (closed_ || peer.gone) return;
  peer.why_gone = reason;
  peer.gone = true;
  const auto error = std::make_exception_ptr(failure_ ? *failure_ : gone_error(rank));
  for (auto& transfer : matcher_.withdraw([&](const Transfer& each) { return each.peer_ == rank; }))
    then.end(std::move(transfer), error);
  while (!peer.connections.empty()) {
    const auto connection = peer.connections.back();
    peer.connections.pop_back();
    if (connection->target) then.end(std::exchange(connection->target, nullptr), error);
    drop(connection);
  }
  std::vector<std::shared_ptr<Transfer>> abandoned;
  const std::lock_guard guard(peer.lock);
  peer.out = nullptr;
  abandon(peer, kAll, abandoned);
  for (auto& transfer : abandoned) then.end(std::move(transfer), error);
  peer.queue.clear();
  peer.idle.notify_all();
}

// A connection becomes one of a rank's.
void Messenger::admit(const ConnectionPtr& connection, int rank, Consequences& then) {
  Peer& peer = peer_of(rank);
  forget(connection->deadline);
  connection->state = Connection::State::kMember;
  peer.connecting = false;
  peer.connections.push_back(connection);
  {
    const std::lock_guard guard(peer.lock);
    if (!peer.out) peer.out = connection;
    const bool is_out = peer.out == connection;
    if (failure_ && is_out) {
      const auto body = net::encode_failure(*failure_);
      peer.queue.push_back({net::failed_frame(body), body, {}, nullptr});
    }
    // One that only receives still has to present itself.
    if (!is_out) greet(*connection);
  }
  watch_for(*connection);
  then.to_flush.push_back(rank);
}

void Messenger::end(const ConnectionPtr& connection, Consequences& then) {
  const int rank = connection->rank;
  const bool is_member = connection->state == Connection::State::kMember;
  const std::string failure = connection->stream->failure(), why = failure.empty() ? kDied : failure;
  drop(connection);
  if (!is_member) return;
  Peer& peer = peer_of(rank);
  if (closed_) {  // close() waits for it
    const std::lock_guard guard(peer.lock);
    connection->write_ended = true;
    peer.idle.notify_all();
    return;
  }
  std::erase(peer.connections, connection);
  if (connection->target)
    then.end(std::exchange(connection->target, nullptr),
             std::make_exception_ptr(failure_ ? *failure_ : gone_error(rank)));
  {
    const std::lock_guard guard(peer.lock);
    connection->write_ended = true;
    connection->stream.reset();  // the peer's next connection may need its descriptor
    // No other connection replaces one that had frames: they may have arrived in part.
    if (peer.out == connection && !connection->has_frames) peer.out = nullptr;
  }
  if (peer.gone) return;
  if (peer.left && peer.connections.empty()) {
    lose(rank, kLeft, then);
  } else if (!peer.left) {
    await_another(rank, why, {}, options_.reconnect);
    if (peer.connections.empty() && std::exchange(peer.why_ended, why).empty()) connect(rank);
  }
}

// Over a connection of its own; without waiting for its end.
void Messenger::send_report(int to, const std::vector<std::byte>& body) {
  Descriptor socket = net::start_connecting(options_.addresses[static_cast<std::size_t>(to)]);
  if (!socket) return;
  const auto connection = start_to(to, std::move(socket));
  connection->state = Connection::State::kReport;
  const net::Frame frame = net::failed_frame(body);
  const auto head = net::bytes_of(frame);
  connection->body.assign(head.begin(), head.end());
  connection->body.insert(connection->body.end(), body.begin(), body.end());
  const std::weak_ptr<Connection> weak = connection;
  call_after(options_.connect_timeout, connection->deadline, [this, weak] {
    const std::lock_guard guard(lock_);
    if (const auto late = weak.lock()) end_report(late);
  });
}

void Messenger::end_report(const ConnectionPtr& connection) {
  if (!connections_.contains(connection)) return;
  drop(connection);
  changed_.notify_all();
}

// A connection that another rank made.
bool Messenger::accept(std::unique_ptr<net::Stream> stream, const net::Greeting& greeting) {
  if (greeting.version != net::kVersion || greeting.rank >= peers_.size()) return false;
  Consequences then;
  {
    const std::lock_guard guard(lock_);
    if (closed_) return false;
    try {
      const auto rank = static_cast<int>(greeting.rank);
      const auto connection = start(std::move(stream), rank, false);
      admit(connection, rank, then);
      read(connection, then);
    } catch (const Error&) {  // the kernel watches no more of them
      return false;
    }
  }
  settle(then);
  return true;
}

// --- reading

void Messenger::ready(const ConnectionPtr& connection, std::uint32_t events) {
  using State = Connection::State;
  Consequences then;
  {
    const std::lock_guard guard(lock_);
    if (!connections_.contains(connection)) return;
    Connection& it = *connection;
    if (it.state == State::kConnecting || it.state == State::kReport) {
      const int error = it.is_connected ? 0 : net::connect_error(it.stream->fd());
      it.is_connected = true;
      if (error != 0) {
        const bool is_report = it.state == State::kReport;
        if (is_report) {
          end_report(connection);
        } else {
          drop(connection);
          unreachable(it.rank, error);
        }
      } else if (const auto result = it.stream->negotiate(); result == net::Negotiation::kFailed) {
        const std::string reason = it.stream->failure();
        if (it.state == State::kReport) {
          end_report(connection);
        } else {
          drop(connection);
          await_another(it.rank, reason, {}, options_.reconnect);
        }
      } else if (result == net::Negotiation::kInProgress) {
        loop_->change(it.watch, it.stream->has_unsent() ? EPOLLIN | EPOLLOUT : EPOLLIN);
      } else if (it.state == State::kReport) {
        loop_->change(it.watch, EPOLLOUT);
        if (greet(it) || it.write_ended) end_report(connection);
      } else {
        admit(connection, it.rank, then);
      }
    } else {
      if ((events & EPOLLOUT) != 0) then.to_flush.push_back(it.rank);
      if ((events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0) read(connection, then);
    }
  }
  settle(then);
}

void Messenger::resume(const ConnectionPtr& connection) {
  connection->paused = false;
  watch_for(*connection);
  read_soon(connection);
}

// What is in a buffer makes no event.
void Messenger::read_soon(const ConnectionPtr& connection) {
  net::EventLoop::Id id = 0;
  call_after({}, id, [this, connection] {
    Consequences then;
    {
      const std::lock_guard guard(lock_);
      if (connections_.contains(connection)) read(connection, then);
    }
    settle(then);
  });
}

// Where the frames of one connection go. With the messenger's lock.
class Messenger::Incoming final : public net::FrameSink {
 public:
  Incoming(Messenger& messenger, const ConnectionPtr& connection, Consequences& then)
      : messenger_(messenger), connection_(connection), then_(then) {}

  bool open(const net::Frame& frame) override { return messenger_.open_frame(connection_, frame, then_); }

  std::byte* place() override {
    Connection& from = *connection_;
    return from.target ? from.target->data_.data : from.scratch.empty() ? nullptr : from.scratch.data();
  }

  bool close() override {
    messenger_.close_frame(connection_, then_);
    return messenger_.connections_.contains(connection_);
  }

 private:
  Messenger& messenger_;
  const ConnectionPtr& connection_;
  Consequences& then_;
};

void Messenger::read(const ConnectionPtr& connection, Consequences& then) {
  if (connection->paused) return;
  Incoming incoming(*this, connection, then);
  std::size_t budget = kReadBudget;
  if (!connection->reader.read(*connection->stream, incoming, budget))
    end(connection, then);
  else if (budget == 0 && !connection->paused && connection->stream->has_buffered())
    read_soon(connection);
}

// Decides where the bytes of a frame go. False: it waits in the socket, or the connection has ended.
bool Messenger::open_frame(const ConnectionPtr& connection, const net::Frame& frame, Consequences& then) {
  Connection& from = *connection;
  Peer& peer = peer_of(from.rank);
  from.target = nullptr;
  from.scratch = {};
  from.is_kept = false;
  if (frame.kind == net::FrameKind::kLeft) {
    peer.left = true;
    return true;
  }
  if (frame.kind > net::FrameKind::kLeft ||
      (frame.kind == net::FrameKind::kFailed && frame.size_bytes > kMaxReport)) {
    lose(from.rank, kGarbled, then);
    return false;
  }
  if (frame.kind == net::FrameKind::kLocal) {
    announced(from.rank, frame, then);
    return true;
  }
  bool is_kept = frame.kind == net::FrameKind::kFailed;
  if (frame.kind == net::FrameKind::kData && !failed_ && !closed_) {
    from.target = matcher_.claim(from.rank, frame.tag);
    if (from.target) {
      if (auto error = matcher_.found(*from.target, from.rank, frame))
        then.end(std::exchange(from.target, nullptr), error);
    } else {
      const bool has_space = frame.size_bytes <= options_.small_bytes &&
                             peer.parked_bytes + frame.size_bytes <= options_.parked_bytes;
      if (!has_space && !matcher_.awaits(from.rank)) {
        from.paused = true;
        watch_for(from);
        return false;
      }
      is_kept = true;
    }
  }
  try {
    if (is_kept) from.scratch.resize(frame.size_bytes);
  } catch (const std::exception&) {  // no frame has such a size
    lose(from.rank, kGarbled, then);
    return false;
  }
  from.is_kept = is_kept;
  received_bytes_.fetch_add(frame.kind == net::FrameKind::kData ? frame.size_bytes : 0,
                            std::memory_order_relaxed);
  return true;
}

// A message is in shared memory.
void Messenger::announced(int source, const net::Frame& frame, Consequences& then) {
  if (failed_ || closed_) return;
  if (const auto transfer = matcher_.claim(source, frame.tag))
    deliver(transfer, {source, frame, {}}, then);
  else
    matcher_.park({source, frame, {}});
}

void Messenger::close_frame(const ConnectionPtr& connection, Consequences& then) {
  Connection& from = *connection;
  const net::Frame& frame = from.reader.frame();
  if (from.target) {
    then.end(std::exchange(from.target, nullptr));
    return;
  }
  if (!from.is_kept) return;
  if (frame.kind == net::FrameKind::kFailed) {
    if (const auto error = net::decode_failure(from.scratch))
      then.failure = error;
    else
      lose(from.rank, kGarbled, then);
    return;
  }
  if (failed_ || closed_) return;
  Parked message{from.rank, frame, std::exchange(from.scratch, {})};
  // A receive may have been posted for it meanwhile.
  if (const auto transfer = matcher_.claim(from.rank, frame.tag)) {
    deliver(transfer, message, then);
    return;
  }
  peer_of(from.rank).parked_bytes += message.data.size();
  matcher_.park(std::move(message));
}

}  // namespace torchrelay
