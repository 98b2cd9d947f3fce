#include "group/messenger.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

#include "core/error.h"
#include "group/messenger_parts.h"

namespace torchrelay {
namespace {

constexpr std::chrono::seconds kLeastToMove{30};  // a message that has arrived, however late

template <class Pointer>
std::vector<Pointer> make(std::size_t count) {
  std::vector<Pointer> out(count);
  for (auto& each : out) each = std::make_unique<typename Pointer::element_type>();
  return out;
}

}  // namespace

Messenger::Messenger(MessengerOptions options, Descriptor listener, ReceiveLocally receive_locally,
                     std::function<void(const Error&)> on_failure)
    : options_(std::move(options)),
      receive_locally_(std::move(receive_locally)),
      on_failure_(std::move(on_failure)),
      loop_(net::EventLoop::shared()),
      greeting_{.rank = static_cast<std::uint32_t>(options_.rank), .token = options_.token},
      peers_(make<std::unique_ptr<Peer>>(options_.addresses.size())),
      spare_(eventfd(0, EFD_CLOEXEC)),
      matcher_(options_.rank, [this](int rank) { return name_of(rank); }),
      listener_(*loop_, std::move(listener),
                {.token = options_.token,
                 .tls = options_.tls,
                 .name = std::to_string(options_.rank),
                 .max_strangers = options_.max_strangers,
                 .greeting_timeout = options_.greeting_timeout,
                 .starved = [this](int error) { lack_a_descriptor(error); }},
                [this](std::unique_ptr<net::Stream> stream, const net::Greeting& greeting) {
                  return accept(std::move(stream), greeting);
                }) {
  const std::size_t size = peers_.size();
  if (options_.rank < 0 || static_cast<std::size_t>(options_.rank) >= size || options_.names.size() != size)
    throw Error(Code::kArgument, "rank " + std::to_string(options_.rank) + " does not fit a group of " +
                                     std::to_string(size) + " ranks");
  if (!spare_) throw Error(Code::kUnavailable, with_errno("keeping a file descriptor for a report"));
  const std::lock_guard guard(lock_);
  sweep_later();
}

Messenger::~Messenger() { close(); }

// --- sending

std::shared_ptr<Transfer> Messenger::send(Block data, int to, std::int64_t tag, std::uint8_t code,
                                          std::chrono::nanoseconds timeout) {
  return post({.code = code, .tag = tag, .size_bytes = data.size_bytes}, data, to, timeout);
}

std::shared_ptr<Transfer> Messenger::announce(Block data, int to, std::int64_t tag, std::uint8_t code,
                                              std::int32_t local_tag) {
  const net::Frame frame{.kind = net::FrameKind::kLocal,
                         .code = code,
                         .local_tag = local_tag,
                         .tag = tag,
                         .size_bytes = data.size_bytes};
  if (to != options_.rank) return post(frame, {}, to, kNoTimeout);
  Consequences then;
  {
    const std::lock_guard guard(lock_);
    announced(to, frame, then);
  }
  settle(then);
  return nullptr;
}

std::shared_ptr<Transfer> Messenger::post(net::Frame frame, Block data, int to,
                                          std::chrono::nanoseconds timeout) {
  require_rank("send", to);
  auto transfer = std::make_shared<Transfer>(data, to, frame.tag, frame.code, timeout);
  transfer->is_remote_ = transfer->sends_ = true;
  Peer& peer = peer_of(to);
  std::vector<std::shared_ptr<Transfer>> sent;
  bool is_connected, is_refused;
  {
    const std::lock_guard guard(peer.lock);
    is_refused = failed_ || closed_ || peer.gone;
    is_connected = peer.out != nullptr;
    if (!is_refused) {
      sent_bytes_.fetch_add(data.size_bytes, std::memory_order_relaxed);
      peer.queue.push_back({frame, {}, data, transfer});
      if (is_connected && !peer.out->wants_write) flush(peer, sent);
    }
  }
  for (auto& each : sent) each->ticket().finish(nullptr);
  if (is_connected && !is_refused) return transfer;
  Consequences then;
  {
    const std::lock_guard guard(lock_);
    if (is_refused)
      then.end(transfer, refusal(to));
    else
      connect(to);
  }
  settle(then);
  return transfer;
}

std::exception_ptr Messenger::refusal(int rank) const {
  return std::make_exception_ptr(failure_ ? *failure_ : closed_ ? destroyed() : gone_error(rank));
}

// A frame of our own, which is sent even if the group has failed.
void Messenger::queue(int to, const net::Frame& frame, std::vector<std::byte> body) {
  Peer& peer = peer_of(to);
  std::vector<std::shared_ptr<Transfer>> sent;
  {
    const std::lock_guard guard(peer.lock);
    peer.queue.push_back({frame, std::move(body), {}, nullptr});
    flush(peer, sent);
  }
  for (auto& each : sent) each->ticket().finish(nullptr);
}

// Ends sends before their bytes have left: nobody reads their memory any more. Called with the peer's lock.
// What a started frame lacks is copied, because another frame cannot take its place.
void Messenger::abandon(Peer& peer, const std::function<bool(const Transfer&)>& which,
                        std::vector<std::shared_ptr<Transfer>>& abandoned) {
  for (auto it = peer.queue.begin(); it != peer.queue.end();) {
    if (!it->transfer || !which(*it->transfer)) {
      ++it;
      continue;
    }
    abandoned.push_back(std::move(it->transfer));
    it->transfer = nullptr;
    if (it->sent == 0) {
      it = peer.queue.erase(it);
      continue;
    }
    if (it->data.size_bytes != 0) {
      it->body.assign(it->data.data, it->data.data + it->data.size_bytes);
      it->data = {};
    }
    ++it;
  }
}

// --- receiving

std::shared_ptr<Transfer> Messenger::receive(Block data, int source, std::int64_t tag, std::uint8_t code,
                                             std::chrono::nanoseconds timeout) {
  if (source != kAnyRank) require_rank("recv", source);
  auto transfer = std::make_shared<Transfer>(data, source, tag, code, timeout);
  transfer->is_remote_ = true;
  Consequences then;
  {
    const std::lock_guard guard(lock_);
    if (failed_ || closed_) {
      then.end(transfer, refusal(source));
    } else if (const auto parked = matcher_.take(*transfer)) {
      peer_of(parked->source).parked_bytes -= parked->data.size();
      deliver(transfer, *parked, then);
    } else if (source != kAnyRank && peer_of(source).gone) {
      then.end(transfer, refusal(source));
    } else {
      matcher_.post(transfer);
      if (source != kAnyRank) connect(source);
      for (const auto& connection : connections_)
        if (connection->paused && (source == kAnyRank || connection->rank == source)) resume(connection);
    }
  }
  settle(then);
  return transfer;
}

// Gives a receive a message that is in memory, or whose bytes are in shared memory.
void Messenger::deliver(const std::shared_ptr<Transfer>& transfer, const Parked& message,
                        Consequences& then) {
  if (message.frame.kind == net::FrameKind::kLocal) {
    transfer->is_remote_ = false;
    then.local.push_back({transfer, message.source, message.frame});
  } else {
    then.end(transfer, matcher_.deliver(*transfer, message));
  }
}

// A message that its receiver does not expect is received too, and dropped: it would stay in shared memory.
void Messenger::receive_local(const std::shared_ptr<Transfer>& transfer, int source,
                              const net::Frame& frame) {
  const auto error = matcher_.found(*transfer, source, frame);
  const auto left = std::max<std::chrono::nanoseconds>(transfer->end_ - Clock::now(), kLeastToMove);
  try {
    const auto local = receive_locally_(transfer->data_, source, frame.local_tag, transfer->code_, left);
    local->ticket().when_done(
        [transfer, local, error] { transfer->ticket().finish(error ? error : local->ticket().error()); });
  } catch (const Error&) {
    transfer->ticket().finish(error ? error : std::current_exception());
  }
}

// --- waiting

bool Messenger::wait(const std::shared_ptr<Transfer>& transfer, std::chrono::nanoseconds timeout,
                     const std::function<void()>& poll) {
  if (!transfer->is_remote_) return transfer->ticket().wait(timeout, poll);  // its mailboxes watch the time
  const auto now = Clock::now();
  const auto left = std::max<std::chrono::nanoseconds>(transfer->end_ - now, std::chrono::nanoseconds(0));
  if (transfer->ticket().wait(std::min(timeout, left), poll)) return true;
  if (timeout < left) return false;
  expire(transfer);
  return transfer->ticket().wait(timeout - left, poll);
}

void Messenger::complete(const std::shared_ptr<Transfer>& transfer, const char* operation,
                         Clock::time_point deadline, const std::function<void()>& poll) {
  const auto started = Clock::now();
  const struct Count {
    ~Count() {
      self.waited_ns_.fetch_add(static_cast<std::uint64_t>((Clock::now() - start).count()),
                                std::memory_order_relaxed);
    }
    Messenger& self;
    Clock::time_point start;
  } count{*this, started};
  const auto left = std::max<std::chrono::nanoseconds>(deadline - started, std::chrono::nanoseconds(0));
  const int peer = name_of(transfer->peer_);
  std::optional<Error> error;
  bool is_done = false;
  try {
    is_done = transfer->ticket().wait(left, poll);
  } catch (const Error& thrown) {
    if (!transfer->ticket().done()) throw;  // by poll
    error = thrown;
  }
  if (is_done) return;
  if (!error)
    error = Error(Code::kTimeout,
                  "rank " + std::to_string(name_of(options_.rank)) + ", " + operation + ": rank " +
                      std::to_string(peer) +
                      " did not answer in time; is it stuck, slow or cut off? A longer timeout can be given "
                      "to init_process_group",
                  {peer});
  throw with_host(*error, transfer->peer_);
}

// A message that arrives for it later is parked, or read and dropped if it is arriving. One in shared memory
// is left to its mailboxes, which watch the time.
void Messenger::expire(const std::shared_ptr<Transfer>& transfer) {
  std::vector<std::shared_ptr<Transfer>> abandoned;
  {
    const std::lock_guard guard(lock_);
    if (!transfer->is_remote_) return;
    matcher_.withdraw([&](const Transfer& each) { return &each == transfer.get(); });
    for (const auto& connection : connections_)
      if (connection->target == transfer) connection->target = nullptr;
    if (transfer->sends_) {
      Peer& peer = peer_of(transfer->peer_);
      const std::lock_guard peer_guard(peer.lock);
      abandon(peer, [&](const Transfer& each) { return &each == transfer.get(); }, abandoned);
    }
  }
  transfer->ticket().finish(matcher_.late(*transfer));
}

void Messenger::sweep_later() {
  net::EventLoop::Id id = 0;
  call_after(options_.sweep_period, id, [this] { sweep(); });
}

// Ends what is late and has no waiter.
void Messenger::sweep() {
  std::vector<std::shared_ptr<Transfer>> overdue;
  {
    const std::lock_guard guard(lock_);
    if (closed_) return;
    sweep_later();
    const auto look_at = [&overdue, now = Clock::now()](const std::shared_ptr<Transfer>& transfer) {
      if (transfer && transfer->end_ <= now) overdue.push_back(transfer);
    };
    for (const auto& transfer : matcher_.posted()) look_at(transfer);
    for (const auto& connection : connections_) look_at(connection->target);
    for (const auto& peer : peers_) {
      const std::lock_guard peer_guard(peer->lock);
      for (const auto& outgoing : peer->queue) look_at(outgoing.transfer);
    }
  }
  for (const auto& transfer : overdue) expire(transfer);
}

// --- failures

Error Messenger::gone_error(int rank) const {
  const std::string& why = peer_of(rank).why_gone;
  return {Code::kPeerLost,
          "rank " + std::to_string(name_of(rank)) + " " + (why.empty() ? kDied : why),
          {name_of(rank)}};
}

Error Messenger::lacking(const std::string& what, int error) const {
  errno = error;
  const int me = name_of(options_.rank);
  return {Code::kPeerLost, with_errno("rank " + std::to_string(me) + " " + what), {me}};
}

// The spare one is for it first.
void Messenger::lack_a_descriptor(int error) {
  {
    const std::lock_guard guard(lock_);
    if (spare_) return spare_.reset();
  }
  fail(lacking("cannot accept the connection of another rank", error));
}

std::optional<Error> Messenger::lost(const std::vector<int>& ranks) {
  std::optional<Error> error;
  int lost_rank = -1;
  {
    const std::lock_guard guard(lock_);
    for (const int rank : ranks) {
      if (!peer_of(rank).gone || peer_of(rank).left) continue;
      error = gone_error(lost_rank = rank);
      break;
    }
  }
  if (error) error = with_host(*error, lost_rank);
  return error;
}

Error Messenger::with_host(const Error& error, int peer) {
  const auto& host = *std::ranges::find_if(
      options_.hosts, [&](const auto& ranks) { return std::ranges::find(ranks, peer) != ranks.end(); });
  std::vector<int> others;
  for (const int rank : host)
    if (!failed_ && rank != peer &&
        !net::is_reachable(options_.addresses[static_cast<std::size_t>(rank)], options_.probe_timeout))
      others.push_back(name_of(rank));
  if (others.empty()) return error;
  {  // Or they ended because they knew, and their report is on its way here.
    std::unique_lock guard(lock_);
    if (changed_.wait_for(guard, options_.report_timeout, [&] { return failure_.has_value(); })) return error;
  }
  std::string list = others.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < others.size(); ++i) list += (i == 0 ? "" : ", ") + std::to_string(others[i]);
  std::vector<int> ranks = error.ranks();
  ranks.insert(ranks.end(), others.begin(), others.end());
  std::ranges::sort(ranks);
  return {error.code(), std::string(error.what()) + "; nor can " + list + " of its host be reached",
          std::move(ranks)};
}

std::optional<Error> Messenger::failure() const {
  const std::lock_guard guard(lock_);
  return failure_;
}

Error Messenger::fail(const Error& error) {
  Consequences then;
  const auto body = net::encode_failure(error);
  std::vector<int> connected;
  {
    const std::lock_guard guard(lock_);
    if (failure_) return *failure_;
    failure_ = error;
    failed_at_ = Clock::now();
    failed_ = true;
    const auto thrown = std::make_exception_ptr(error);
    for (auto& transfer : matcher_.withdraw(kAll)) then.end(std::move(transfer), thrown);
    for (const auto& connection : connections_) {
      if (connection->target) then.end(std::exchange(connection->target, nullptr), thrown);
      if (connection->paused) resume(connection);
    }
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
      Peer& peer = *peers_[rank];
      std::vector<std::shared_ptr<Transfer>> abandoned;
      const std::lock_guard peer_guard(peer.lock);
      abandon(peer, kAll, abandoned);
      for (auto& transfer : abandoned) then.end(std::move(transfer), thrown);
      if (!peer.connections.empty()) connected.push_back(static_cast<int>(rank));
    }
    spare_.reset();
    // The leaders pass it on; frames that were sent before may block their connection.
    for (const auto& ranks : options_.hosts)
      if (std::ranges::find(ranks, options_.rank) == ranks.end() && !closed_) send_report(ranks[0], body);
    changed_.notify_all();
  }
  for (const int rank : connected) queue(rank, net::failed_frame(body), body);
  settle(then);
  on_failure_(error);
  return error;
}

void Messenger::require_rank(const char* operation, int rank) const {
  if (rank >= 0 && static_cast<std::size_t>(rank) < peers_.size()) return;
  throw Error(Code::kArgument, "rank " + std::to_string(name_of(options_.rank)) + ", " + operation +
                                   ": there is no rank " + std::to_string(rank) + " in a group of " +
                                   std::to_string(peers_.size()));
}

// --- the end

void Messenger::close() {
  Consequences then;
  std::vector<int> connected;
  const auto now = Clock::now();
  std::vector<Clock::time_point> deadlines(peers_.size(), now + options_.flush_timeout);
  {
    const std::lock_guard guard(lock_);
    if (closed_.exchange(true)) return;
    for (std::size_t rank = 0; failure_ && rank < peers_.size(); ++rank) {
      deadlines[rank] = failed_at_ + options_.flush_timeout;
      if (std::ranges::find(failure_->ranks(), options_.names[rank]) != failure_->ranks().end())
        deadlines[rank] = std::min(deadlines[rank], now + options_.last_report_timeout);
    }
    const auto error = std::make_exception_ptr(destroyed());
    for (auto& transfer : matcher_.withdraw(kAll)) then.end(std::move(transfer), error);
    for (const auto& connection : connections_) {
      if (connection->target) then.end(std::exchange(connection->target, nullptr), error);
      if (connection->paused) resume(connection);
    }
    for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank)
      if (!peer_of(rank).connections.empty() || peer_of(rank).connecting) connected.push_back(rank);
  }
  for (const int rank : connected) queue(rank, {.kind = net::FrameKind::kLeft}, {});
  settle(then);

  for (const int rank : connected) {
    Peer& peer = peer_of(rank);
    std::unique_lock guard(peer.lock);
    peer.idle.wait_until(guard, deadlines[static_cast<std::size_t>(rank)], [&] {
      return peer.queue.empty() || peer.gone || (peer.out && peer.out->write_ended);
    });
  }
  std::set<ConnectionPtr> connections;
  std::set<net::EventLoop::Id> ids;
  {
    std::unique_lock guard(lock_);
    for (std::size_t rank = 0; rank < peers_.size(); ++rank)
      changed_.wait_until(guard, deadlines[rank], [&] {
        return std::ranges::none_of(connections_, [&](const ConnectionPtr& each) {
          return each->state == Connection::State::kReport && each->rank == static_cast<int>(rank);
        });
      });
    connections.swap(connections_);
    ids.swap(timers_);
    for (const auto& connection : connections) ids.insert(connection->watch);
    for (const auto& peer : peers_) peer->connections.clear();
  }
  for (const auto id : ids) loop_->forget(id);
  listener_.close();  // and waits for what a connection that ended meanwhile still does
  Consequences last;
  for (const auto& peer : peers_) {
    std::vector<std::shared_ptr<Transfer>> abandoned;
    const std::lock_guard guard(peer->lock);
    peer->out = nullptr;
    abandon(*peer, kAll, abandoned);
    for (auto& transfer : abandoned) last.end(std::move(transfer), std::make_exception_ptr(destroyed()));
    peer->queue.clear();
  }
  settle(last);
}

void Messenger::settle(Consequences& then) {
  for (auto& end : then.ended) end.transfer->ticket().finish(end.error);
  for (auto& local : then.local) receive_local(local.transfer, local.source, local.frame);
  for (const int rank : then.to_flush) flush_to(rank);
  if (then.failure) fail(*then.failure);
}

}  // namespace torchrelay
