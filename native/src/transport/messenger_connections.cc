#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "messenger_parts.h"

namespace torchrelay::transport {
namespace {

constexpr std::size_t kReadBytes = std::size_t{256} << 10;  // with the lock, which senders rarely need
constexpr std::size_t kReadBudget = std::size_t{2} << 20;   // of one connection before the others' turn
constexpr std::size_t kMaxReport = std::size_t{64} << 10;
constexpr int kMaxParts = 64;
constexpr int kMaxAccepted = 64;  // before the others' turn
constexpr std::chrono::milliseconds kRetryAccept{50};

}  // namespace

// --- writing

// Writes what the socket accepts of one frame; true when it is complete.
bool Messenger::write(Connection& connection, Outgoing& outgoing, bool& blocked) {
  std::array<iovec, 3> parts;
  int count = 0;
  std::size_t skip = outgoing.sent, left = 0;
  const auto add = [&](const std::byte* data, std::size_t size) {
    const std::size_t skipped = std::min(skip, size);
    skip -= skipped;
    if (size == skipped) return;
    parts[static_cast<std::size_t>(count++)] = {const_cast<std::byte*>(data) + skipped, size - skipped};
    left += size - skipped;
  };
  add(outgoing.head.data(), outgoing.head.size());
  add(outgoing.body.data(), outgoing.body.size());
  add(outgoing.data.data, outgoing.data.size_bytes);
  if (left == 0) return true;
  const Moved moved = connection.stream->write(parts.data(), count);
  outgoing.sent += moved.size_bytes;
  connection.write_ended = moved.ended;  // the loop sees the same end, after what can still be read
  blocked = moved.size_bytes < left;
  return !blocked;
}

// Called with the peer's lock. Moves transfers that were sent to `sent`.
bool Messenger::flush(Peer& peer, std::vector<std::shared_ptr<Transfer>>& sent) {
  if (!peer.out || peer.out->write_ended) return false;
  Connection& out = *peer.out;
  bool blocked = false;
  if (out.greeting && write(out, *out.greeting, blocked)) out.greeting.reset();
  while (!out.greeting && !blocked && !peer.queue.empty()) {
    if (!write(out, peer.queue.front(), blocked)) break;
    if (peer.queue.front().transfer) sent.push_back(std::move(peer.queue.front().transfer));
    peer.queue.pop_front();
  }
  if (peer.queue.empty()) peer.idle.notify_all();
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

Messenger::ConnectionPtr Messenger::start(Descriptor socket, bool connecting) {
  auto connection = std::make_shared<Connection>();
  const int fd = socket.get();
  connection->stream = std::make_unique<PlainStream>(std::move(socket));
  connection->state = connecting ? Connection::State::kConnecting : Connection::State::kStranger;
  if (connecting) {
    const Greeting greeting{kMagic, kVersion, 0, static_cast<std::uint32_t>(options_.rank), options_.token};
    connection->greeting.emplace().head = bytes_of(greeting);
  }
  connection->watch = loop_->watch(fd, connecting ? EPOLLOUT : EPOLLIN,
                                   [this, connection](std::uint32_t events) { ready(connection, events); });
  connections_.insert(connection);
  return connection;
}

void Messenger::call_after(std::chrono::milliseconds delay, EventLoop::Id& id,
                           std::function<void()> function) {
  const auto known = std::make_shared<EventLoop::Id>();
  id = *known = loop_->call_at(Clock::now() + delay, [this, known, function = std::move(function)] {
    {
      const std::lock_guard guard(lock_);
      timers_.erase(*known);
    }
    function();
  });
  timers_.insert(id);
}

void Messenger::forget(EventLoop::Id& id) {
  if (id == 0) return;
  timers_.erase(id);
  loop_->forget(std::exchange(id, 0));
}

void Messenger::connect(int to) {
  Peer& peer = peer_of(to);
  if (!peer.connections.empty() || peer.connecting || peer.gone || failed_ || closed_) return;
  peer.connecting = true;
  Descriptor socket = start_connecting(options_.addresses[static_cast<std::size_t>(to)]);
  if (!socket) {
    await_another(to, "cannot be reached (" + std::string(std::strerror(errno)) + ")");
    return;
  }
  const auto connection = start(std::move(socket), true);
  connection->rank = to;
  const std::weak_ptr<Connection> weak = connection;
  call_after(options_.connect_timeout, connection->deadline, [this, weak, to] {
    const std::lock_guard guard(lock_);
    const auto late = weak.lock();
    if (!late || late->state != Connection::State::kConnecting) return;
    drop(late);
    await_another(to, "cannot be reached (" + std::string(std::strerror(ETIMEDOUT)) + ")");
  });
}

// Removes a connection; its socket is closed when nobody uses it any more.
void Messenger::drop(const ConnectionPtr& connection) {
  if (connections_.erase(connection) == 0) return;
  std::erase(strangers_, connection);
  loop_->forget(connection->watch);
  forget(connection->deadline);
}

// Loses a peer unless it makes another connection meanwhile.
void Messenger::await_another(int rank, const std::string& reason) {
  if (closed_) return;
  EventLoop::Id id = 0;
  call_after(options_.reconnect, id, [this, rank, reason] {
    Consequences then;
    {
      const std::lock_guard guard(lock_);
      Peer& peer = peer_of(rank);
      peer.connecting = false;
      bool has_way;
      {
        const std::lock_guard peer_guard(peer.lock);
        has_way = !peer.connections.empty() && peer.out != nullptr;
      }
      if (!has_way) lose(rank, peer.left ? kLeft : reason, then);
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
  std::erase_if(posted_, [&](const auto& transfer) {
    if (transfer->peer_ != rank) return false;
    then.end(transfer, error);
    return true;
  });
  while (!peer.connections.empty()) {
    const auto connection = peer.connections.back();
    peer.connections.pop_back();
    if (connection->target) then.end(std::exchange(connection->target, nullptr), error);
    drop(connection);
  }
  std::vector<std::shared_ptr<Transfer>> abandoned;
  const std::lock_guard guard(peer.lock);
  peer.out = nullptr;
  abandon(peer, [](const Transfer&) { return true; }, abandoned);
  for (auto& transfer : abandoned) then.end(std::move(transfer), error);
  peer.queue.clear();
  peer.idle.notify_all();
}

// A connection becomes one of a rank's.
void Messenger::admit(const ConnectionPtr& connection, int rank, Consequences& then) {
  Peer& peer = peer_of(rank);
  forget(connection->deadline);
  std::erase(strangers_, connection);
  connection->rank = rank;
  connection->state = Connection::State::kMember;
  peer.connecting = false;
  peer.connections.push_back(connection);
  {
    const std::lock_guard guard(peer.lock);
    if (!peer.out) peer.out = connection;
    const bool is_out = peer.out == connection;
    if (failure_ && is_out) {
      const auto body = encode(*failure_);
      peer.queue.push_back({bytes_of(failed_frame(body)), body, {}, nullptr});
    }
    // One that only receives still has to present itself.
    bool blocked = false;
    if (!is_out && connection->greeting && write(*connection, *connection->greeting, blocked))
      connection->greeting.reset();
  }
  watch_for(*connection);
  then.to_flush.push_back(rank);
}

void Messenger::end(const ConnectionPtr& connection, Consequences& then) {
  const int rank = connection->rank;
  const bool is_member = connection->state == Connection::State::kMember;
  drop(connection);
  if (!is_member || closed_) return;
  Peer& peer = peer_of(rank);
  std::erase(peer.connections, connection);
  if (connection->target)
    then.end(std::exchange(connection->target, nullptr),
             std::make_exception_ptr(failure_ ? *failure_ : gone_error(rank)));
  {
    const std::lock_guard guard(peer.lock);
    if (peer.out == connection) peer.out = nullptr;
  }
  if (peer.gone) return;
  if (peer.left && peer.connections.empty())
    lose(rank, kLeft, then);
  else if (!peer.left)
    await_another(rank, kDied);
}

// Over a connection of its own; without waiting for its end.
void Messenger::send_report(int to, const std::vector<std::byte>& body) {
  Descriptor socket = start_connecting(options_.addresses[static_cast<std::size_t>(to)]);
  if (!socket) return;
  const auto connection = start(std::move(socket), true);
  connection->state = Connection::State::kReport;
  Outgoing& outgoing = *connection->greeting;
  const auto frame = bytes_of(failed_frame(body));
  outgoing.body = frame;
  outgoing.body.insert(outgoing.body.end(), body.begin(), body.end());
  ++reports_;
  const std::weak_ptr<Connection> weak = connection;
  call_after(options_.connect_timeout, connection->deadline, [this, weak] {
    const std::lock_guard guard(lock_);
    if (const auto late = weak.lock()) end_report(late);
  });
}

void Messenger::end_report(const ConnectionPtr& connection) {
  if (!connections_.contains(connection)) return;
  drop(connection);
  --reports_;
  changed_.notify_all();
}

// --- strangers

void Messenger::accept_all(std::uint32_t) {
  Consequences then;
  {
    const std::lock_guard guard(lock_);
    for (int i = 0; i < kMaxAccepted && !closed_; ++i) {
      Descriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!socket) {
        if (errno == EAGAIN || errno == EWOULDBLOCK) break;
        if (errno == EINTR || errno == ECONNABORTED) continue;
        end_oldest_stranger(then);  // there may be no descriptor left
        loop_->change(listening_, 0);
        EventLoop::Id id = 0;
        call_after(kRetryAccept, id, [this] { loop_->change(listening_, EPOLLIN); });
        break;
      }
      if (strangers_.size() >= options_.max_strangers) end_oldest_stranger(then);
      ConnectionPtr stranger;
      try {
        stranger = start(std::move(socket), false);
      } catch (const Error&) {
        continue;  // the kernel watches no more of them
      }
      strangers_.push_back(stranger);
      const std::weak_ptr<Connection> weak = stranger;
      call_after(options_.greeting_timeout, stranger->deadline, [this, weak] {
        const std::lock_guard late_guard(lock_);
        const auto late = weak.lock();
        if (late && late->state == Connection::State::kStranger) drop(late);
      });
    }
  }
  settle(then);
}

void Messenger::end_oldest_stranger(Consequences& then) {
  if (strangers_.empty()) return;
  const auto oldest = strangers_.front();
  greet(oldest, then);  // it may have spoken since
  if (oldest->state == Connection::State::kStranger) drop(oldest);
}

// Reads the greeting; admits a rank, and ends what is none. False: more must come, or it ended.
bool Messenger::greet(const ConnectionPtr& connection, Consequences& then) {
  Connection& from = *connection;
  const Moved moved = from.stream->read(from.buffer.data() + from.size, from.buffer.size() - from.size);
  from.size += moved.size_bytes;
  if (from.size < sizeof(Greeting)) {
    if (moved.ended) drop(connection);
    return false;
  }
  Greeting greeting;
  std::memcpy(&greeting, from.buffer.data(), sizeof greeting);
  if (greeting.magic != kMagic || greeting.version != kVersion || greeting.rank >= peers_.size() ||
      !equal(greeting.token, options_.token) || closed_) {
    drop(connection);
    return false;
  }
  from.begin = sizeof greeting;
  from.size -= sizeof greeting;
  admit(connection, static_cast<int>(greeting.rank), then);
  read(connection, then);
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
      if (const int error = connect_error(it.stream->fd()); error != 0) {
        const bool is_report = it.state == State::kReport;
        if (is_report) {
          end_report(connection);
        } else {
          drop(connection);
          await_another(it.rank, "cannot be reached (" + std::string(std::strerror(error)) + ")");
        }
      } else if (it.state == State::kReport) {
        bool blocked = false;
        if (write(it, *it.greeting, blocked) || it.write_ended) end_report(connection);
      } else {
        admit(connection, it.rank, then);
      }
    } else if (it.state == State::kStranger) {
      greet(connection, then);
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
  EventLoop::Id id = 0;
  call_after({}, id, [this, connection] {  // what is in its buffer makes no event
    Consequences then;
    {
      const std::lock_guard guard(lock_);
      if (connections_.contains(connection)) read(connection, then);
    }
    settle(then);
  });
}

// Reads what has arrived, frame by frame.
void Messenger::read(const ConnectionPtr& connection, Consequences& then) {
  Connection& from = *connection;
  std::size_t budget = kReadBudget;
  bool is_drained = false;  // the last read got less than it could hold
  thread_local std::vector<std::byte> dropped(kReadBytes);
  while (!from.paused && connections_.contains(connection)) {
    if (!from.in_body && from.size >= sizeof(Frame)) {
      std::memcpy(&from.frame, from.buffer.data() + from.begin, sizeof(Frame));
      if (!open_frame(connection, then)) return;
      from.begin += sizeof(Frame);
      from.size -= sizeof(Frame);
      continue;
    }
    if (!from.in_body) {
      if (is_drained) return;
      std::memmove(from.buffer.data(), from.buffer.data() + from.begin, from.size);
      from.begin = 0;
      const std::size_t space = from.buffer.size() - from.size;
      const Moved moved = from.stream->read(from.buffer.data() + from.size, space);
      from.size += moved.size_bytes;
      is_drained = moved.size_bytes < space;
      if (moved.ended) end(connection, then);
      continue;
    }
    const std::size_t left = from.frame.size_bytes - from.got;
    std::byte* to = from.target           ? from.target->data_.data + from.got
                    : !from.aside.empty() ? from.aside.data() + from.got
                                          : nullptr;
    std::size_t size = std::min(left, from.size);
    if (size != 0) {
      if (to != nullptr) std::memcpy(to, from.buffer.data() + from.begin, size);
      from.begin += size;
      from.size -= size;
    } else if (left != 0) {
      if (is_drained || budget == 0) return;  // the loop comes again
      const std::size_t wanted = std::min({left, kReadBytes, budget});
      const Moved moved = from.stream->read(to != nullptr ? to : dropped.data(), wanted);
      if (moved.ended) {
        end(connection, then);
        return;
      }
      size = moved.size_bytes;
      budget -= size;
      is_drained = size < wanted;
    }
    from.got += size;
    if (from.got == from.frame.size_bytes) close_frame(connection, then);
  }
}

// Decides where the bytes of a frame go. False: it waits in the socket, or the connection has ended.
bool Messenger::open_frame(const ConnectionPtr& connection, Consequences& then) {
  Connection& from = *connection;
  const Frame& frame = from.frame;
  Peer& peer = peer_of(from.rank);
  from.got = 0;
  from.target = nullptr;
  from.aside = {};
  if (frame.kind == Kind::kLeft) {
    peer.left = true;
    return true;
  }
  if (frame.kind > Kind::kLeft || (frame.kind == Kind::kFailed && frame.size_bytes > kMaxReport)) {
    lose(from.rank, kGarbled, then);
    return false;
  }
  if (frame.kind == Kind::kLocal) {
    if (const auto transfer = failed_ || closed_ ? nullptr : claim(from.rank, frame.tag))
      deliver(transfer, {from.rank, frame, {}}, then);
    else if (!failed_ && !closed_)
      parked_.push_back({from.rank, frame, {}});
    return true;
  }
  bool is_kept = frame.kind == Kind::kFailed;
  if (frame.kind == Kind::kData && !failed_ && !closed_) {
    from.target = claim(from.rank, frame.tag);
    if (from.target) {
      if (auto error = mismatch_of(*from.target, from.rank, frame))
        then.end(std::exchange(from.target, nullptr), error);
    } else {
      const bool has_space = frame.size_bytes <= options_.small_bytes &&
                             peer.parked_bytes + frame.size_bytes <= options_.parked_bytes;
      if (!has_space && !is_awaited(from.rank)) {
        from.paused = true;
        watch_for(from);
        return false;
      }
      is_kept = true;
    }
  }
  try {
    if (is_kept) from.aside.resize(frame.size_bytes);
  } catch (const std::exception&) {  // no frame has such a size
    lose(from.rank, kGarbled, then);
    return false;
  }
  from.is_kept = is_kept;
  received_bytes_.fetch_add(frame.kind == Kind::kData ? frame.size_bytes : 0, std::memory_order_relaxed);
  from.in_body = true;
  return true;
}

void Messenger::close_frame(const ConnectionPtr& connection, Consequences& then) {
  Connection& from = *connection;
  from.in_body = false;
  if (from.target) {
    from.target->source_ = from.rank;
    then.end(std::exchange(from.target, nullptr));
    return;
  }
  if (!from.is_kept) return;
  if (from.frame.kind == Kind::kFailed) {
    if (const auto error = decode(from.aside))
      then.failure = error;
    else
      lose(from.rank, kGarbled, then);
    return;
  }
  if (failed_ || closed_) return;
  Parked message{from.rank, from.frame, std::exchange(from.aside, {})};
  // A receive may have been posted for it meanwhile.
  if (const auto transfer = claim(from.rank, from.frame.tag)) {
    deliver(transfer, std::move(message), then);
    return;
  }
  peer_of(from.rank).parked_bytes += message.data.size();
  parked_.push_back(std::move(message));
}

}  // namespace torchrelay::transport
