#include "group/mailboxes.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace torchrelay {
namespace {

using Clock = std::chrono::steady_clock;

// One side publishes its progress this often in a ring, so that the other copies meanwhile.
constexpr std::size_t kPartsPerRing = 8;

// Negative tags are ours.
void require_tag(const char* operation, std::int64_t tag) {
  if (tag < 0)
    throw Error(Code::kArgument,
                std::string(operation) + ": a tag must be 0 or more, not " + std::to_string(tag));
}

}  // namespace

// One writer, one reader. Positions only grow; the bytes of position p lie at p modulo the capacity.
struct Mailboxes::Ring {
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> read;

  std::byte* bytes() noexcept { return reinterpret_cast<std::byte*>(this + 1); }

  void put(std::size_t capacity, std::uint64_t at, const std::byte* from, std::size_t size) noexcept {
    const std::size_t start = at % capacity;
    const std::size_t first = std::min(size, capacity - start);
    if (first != 0) std::memcpy(bytes() + start, from, first);
    if (size != first) std::memcpy(bytes(), from + first, size - first);
  }

  void take(std::size_t capacity, std::uint64_t at, std::byte* to, std::size_t size) noexcept {
    const std::size_t start = at % capacity;
    const std::size_t first = std::min(size, capacity - start);
    if (first != 0) std::memcpy(to, bytes() + start, first);
    if (size != first) std::memcpy(to + first, bytes(), size - first);
  }
};

Mailboxes::Mailboxes(SharedGroup& group)
    : group_(group),
      matcher_(group.rank(), [&group](int rank) { return group.name_of(rank); }),
      outgoing_(static_cast<std::size_t>(group.size())),
      inboxes_(static_cast<std::size_t>(group.size())) {
  if (group.shape().mailbox_bytes < 2 * sizeof(Ring))
    throw Error(Code::kArgument, "a mailbox needs at least " + std::to_string(2 * sizeof(Ring)) + " bytes");
}

Mailboxes::Ring& Mailboxes::ring(int from, int to) const noexcept {
  return *reinterpret_cast<Ring*>(group_.mailbox(from, to));
}

std::shared_ptr<Transfer> Mailboxes::send(Block data, int to, std::int64_t tag, std::uint8_t code,
                                          std::chrono::nanoseconds timeout) {
  Operation operation;
  operation.name = "send";
  group_.require_rank(operation.name, to);
  require_tag(operation.name, tag);
  group_.throw_if_broken(operation);
  auto transfer = std::make_shared<Transfer>(data, to, tag, code, timeout);
  transfer->sends_ = true;
  {
    const std::lock_guard guard(lock_);
    if (stopping_) throw destroyed();
    outgoing_[static_cast<std::size_t>(to)].push_back(transfer);
  }
  drive(transfer);
  return transfer;
}

std::shared_ptr<Transfer> Mailboxes::receive(Block data, int from, std::int64_t tag, std::uint8_t code,
                                             std::chrono::nanoseconds timeout, bool has_begun) {
  Operation operation;
  operation.name = "recv";
  if (from != kAnyRank) group_.require_rank(operation.name, from);
  if (tag > kLastAnyTag) require_tag(operation.name, tag);
  group_.throw_if_broken(operation);
  auto transfer = std::make_shared<Transfer>(data, from, tag, code, timeout);
  transfer->begun_ = has_begun;
  std::vector<Ended> ended;
  {
    const std::lock_guard guard(lock_);
    if (stopping_) throw destroyed();
    if (const auto parked = matcher_.take(*transfer))
      ended.push_back({transfer, matcher_.deliver(*transfer, *parked)});
    else
      matcher_.post(transfer);
  }
  for (auto& end : ended) end.transfer->ticket().finish(end.error);
  drive(transfer);
  return transfer;
}

// Does what can be done at once; leaves the rest to a waiter or the thread.
void Mailboxes::drive(const std::shared_ptr<Transfer>& transfer) {
  std::unique_lock guard(lock_);
  step(guard);
  if (transfer->ticket().done()) return;
  if (stopping_) return;  // stop() fails what is in progress
  try {
    if (!thread_.joinable()) thread_ = start_thread([this] { loop(); });
  } catch (const Error&) {  // the next wait or message moves it
  }
  changed_.notify_all();
}

bool Mailboxes::wait(Transfer& transfer, std::chrono::nanoseconds timeout, Patience patience,
                     const std::function<void()>& poll) {
  auto looked = Clock::now();
  const auto end = looked + timeout;
  std::exception_ptr stop;
  std::unique_lock guard(lock_);
  if (timeout <= timeout.zero()) {
    step(guard);
    return transfer.ticket().done() && transfer.ticket().wait(timeout, {});
  }
  ++waiters_;
  while (!transfer.ticket().done() && !stop) {
    if (!turn(guard, &transfer, patience, looked)) continue;
    guard.unlock();
    try {
      if (poll) poll();
    } catch (...) {
      stop = std::current_exception();
    }
    guard.lock();
    if (looked >= end) break;
  }
  --waiters_;
  changed_.notify_all();
  guard.unlock();
  if (stop) std::rethrow_exception(stop);
  return transfer.ticket().done() && transfer.ticket().wait(std::chrono::nanoseconds(0), {});
}

// Moves what can be moved, else waits for mail. True: it has looked after the peers, which it does every
// slice of time.
bool Mailboxes::turn(std::unique_lock<std::mutex>& guard, Transfer* awaited, Patience patience,
                     Clock::time_point& looked) {
  const std::uint32_t seen = group_.mail();
  bool moved = step(guard) || (awaited != nullptr && awaited->ticket().done());
  if (!moved) {
    guard.unlock();
    group_.await_mail(seen, patience);
    guard.lock();
    moved = group_.mail() != seen;
  }
  if (moved && Clock::now() - looked < SharedGroup::kSlice) return false;
  looked = Clock::now();
  guard.unlock();
  look_after_peers();
  guard.lock();
  return true;
}

// Moves what can be moved now. Tickets end after the lock is released, because what follows them may call us.
bool Mailboxes::step(std::unique_lock<std::mutex>& guard) {
  std::vector<Ended> ended;
  bool moved = false;
  if (!failed_) {
    moved = push(ended);
    for (int from = 0; from < group_.size(); ++from) moved |= pull(from, ended);
  }
  expire(ended);
  if (ended.empty()) return moved;
  guard.unlock();
  for (auto& end : ended) end.transfer->ticket().finish(end.error);
  guard.lock();
  return true;
}

bool Mailboxes::push(std::vector<Ended>& ended) {
  bool moved = false;
  const std::size_t capacity = group_.shape().mailbox_bytes - sizeof(Ring), part = capacity / kPartsPerRing;
  for (int to = 0; to < group_.size(); ++to) {
    auto& queue = outgoing_[static_cast<std::size_t>(to)];
    Ring& out = ring(group_.rank(), to);
    const std::uint64_t start = out.written.load(std::memory_order_relaxed);
    std::uint64_t at = start, announced = start;
    while (!queue.empty() && at - start < capacity) {  // then it is the other peers' turn
      Transfer& transfer = *queue.front();
      const std::uint64_t before = at;
      std::size_t space = capacity - static_cast<std::size_t>(at - out.read.load(std::memory_order_acquire));
      if (!transfer.begun_) {
        if (space < sizeof(Frame)) break;
        const Frame frame{transfer.data_.size_bytes, transfer.tag_, transfer.code_};
        out.put(capacity, at, reinterpret_cast<const std::byte*>(&frame), sizeof frame);
        at += sizeof frame;
        space -= sizeof frame;
        transfer.begun_ = true;
      }
      const std::size_t size = std::min({space, part, transfer.data_.size_bytes - transfer.moved_});
      out.put(capacity, at, transfer.data_.data + transfer.moved_, size);
      at += size;
      if (at == before) break;  // the ring is full
      out.written.store(at, std::memory_order_release);
      if (at - announced >= part) {
        group_.notify(to);
        announced = at;
      }
      transfer.moved_ += size;
      if (transfer.moved_ < transfer.data_.size_bytes) continue;
      ended.push_back({queue.front(), nullptr});
      queue.pop_front();
    }
    if (at != announced) group_.notify(to);
    moved |= at != start;
  }
  return moved;
}

bool Mailboxes::pull(int from, std::vector<Ended>& ended) {
  Inbox& inbox = inboxes_[static_cast<std::size_t>(from)];
  Ring& in = ring(from, group_.rank());
  const std::size_t capacity = group_.shape().mailbox_bytes - sizeof(Ring), part = capacity / kPartsPerRing;
  const std::uint64_t start = in.read.load(std::memory_order_relaxed);
  std::uint64_t announced = start;
  while (inbox.open || open_frame(from, ended)) {
    const std::uint64_t at = in.read.load(std::memory_order_relaxed);
    const auto there = static_cast<std::size_t>(in.written.load(std::memory_order_acquire) - at);
    const auto size = std::min<std::size_t>({there, part, inbox.frame.size_bytes - inbox.got});
    if (inbox.target || inbox.frame.tag >= 0) {
      std::byte* to = inbox.target ? inbox.target->data_.data : inbox.scratch.data();
      in.take(capacity, at, to + inbox.got, size);
    }
    in.read.store(at + size, std::memory_order_release);
    if (at + size - announced >= part) {
      group_.notify(from);
      announced = at + size;
    }
    inbox.got += size;
    if (inbox.got == inbox.frame.size_bytes)
      close_frame(from, ended);
    else if (size == 0)
      break;
  }
  const std::uint64_t end = in.read.load(std::memory_order_relaxed);
  if (end != announced) group_.notify(from);
  return end != start;
}

// Begins the next message, if it is here and somebody wants it or one behind it.
bool Mailboxes::open_frame(int from, std::vector<Ended>& ended) {
  Ring& in = ring(from, group_.rank());
  const std::size_t capacity = group_.shape().mailbox_bytes - sizeof(Ring);
  const std::uint64_t at = in.read.load(std::memory_order_relaxed);
  if (in.written.load(std::memory_order_acquire) - at < sizeof(Frame) || !matcher_.awaits(from)) return false;
  Inbox& inbox = inboxes_[static_cast<std::size_t>(from)];
  in.take(capacity, at, reinterpret_cast<std::byte*>(&inbox.frame), sizeof(Frame));
  inbox.target = matcher_.claim(from, inbox.frame.tag);
  if (inbox.target) {
    inbox.target->begun_ = true;
    if (auto error = matcher_.found(*inbox.target, from, inbox.frame)) {
      ended.push_back({inbox.target, error});
      inbox.target = nullptr;
      inbox.frame.tag = -1;
    }
  } else {
    try {
      inbox.scratch.resize(inbox.frame.size_bytes);
    } catch (const std::exception&) {  // look_after_peers() sees it
      group_.report(Code::kUnavailable,
                    "rank " + std::to_string(group_.name_of(group_.rank())) + " has no memory for " +
                        std::to_string(inbox.frame.size_bytes) + " bytes from rank " +
                        std::to_string(group_.name_of(from)) + ", tag " + std::to_string(inbox.frame.tag) +
                        ", that arrived before a message that it waits for; receive them in the order in "
                        "which they are sent",
                    {});
      return false;
    }
  }
  in.read.store(at + sizeof(Frame), std::memory_order_release);
  inbox.open = true;
  inbox.got = 0;
  return true;
}

void Mailboxes::close_frame(int from, std::vector<Ended>& ended) {
  Inbox& inbox = inboxes_[static_cast<std::size_t>(from)];
  inbox.open = false;
  if (inbox.target) {
    ended.push_back({std::move(inbox.target), nullptr});
  } else if (inbox.frame.tag >= 0) {
    Matcher<Frame>::Parked message{from, inbox.frame, std::move(inbox.scratch)};
    // A receive may have been posted for it meanwhile.
    if (const auto transfer = matcher_.claim(from, inbox.frame.tag))
      ended.push_back({transfer, matcher_.deliver(*transfer, message)});
    else
      matcher_.park(std::move(message));
  }
  inbox.target = nullptr;
  inbox.scratch = {};
}

// Whether the next step() gets something from a rank.
bool Mailboxes::has_unread(int from) {
  const std::lock_guard guard(lock_);
  Ring& in = ring(from, group_.rank());
  return in.written.load(std::memory_order_acquire) != in.read.load(std::memory_order_relaxed) &&
         (inboxes_[static_cast<std::size_t>(from)].open || matcher_.awaits(from));
}

// Transfers past their time end with an error. One that has begun cannot be taken back: its group is broken.
void Mailboxes::expire(std::vector<Ended>& ended) {
  const auto now = Clock::now();
  const auto is_late = [&](const Transfer& transfer) { return !transfer.begun_ && now >= transfer.end_; };
  for (const auto& transfer : matcher_.withdraw(is_late))
    ended.push_back({transfer, matcher_.late(*transfer)});
  for (auto& queue : outgoing_)
    std::erase_if(queue, [&](const auto& transfer) {
      if (is_late(*transfer)) ended.push_back({transfer, matcher_.late(*transfer)});
      return is_late(*transfer);
    });
}

// Fails everything in progress if a peer that it needs is lost, or a message is late.
void Mailboxes::look_after_peers() try {
  Operation operation;
  operation.name = "send/recv";
  std::vector<bool> peers(static_cast<std::size_t>(group_.size()));
  int stuck = -1;
  {
    const std::lock_guard guard(lock_);
    const auto now = Clock::now();
    for (std::size_t r = 0; r < peers.size(); ++r) {
      const auto& target = inboxes_[r].target;
      const auto& queue = outgoing_[r];
      if ((target && now >= target->end_) ||
          (!queue.empty() && queue.front()->begun_ && now >= queue.front()->end_))
        stuck = static_cast<int>(r);
    }
    bool any = false;
    for (const auto& transfer : matcher_.posted()) {
      if (transfer->peer_ >= 0) peers[static_cast<std::size_t>(transfer->peer_)] = true;
      any |= transfer->peer_ < 0;
      if (transfer->begun_ && now >= transfer->end_) stuck = transfer->peer_;
    }
    for (std::size_t r = 0; r < peers.size(); ++r)
      peers[r] = peers[r] || !outgoing_[r].empty() || inboxes_[r].open ||
                 (any && !group_.has_left(static_cast<int>(r)));
  }
  if (stuck >= 0)
    group_.fail(Code::kTimeout,
                "rank " + std::to_string(group_.name_of(group_.rank())) + ": a message to or from rank " +
                    std::to_string(group_.name_of(stuck)) +
                    " has begun and is not complete after its timeout; is that rank stuck or slow? A longer "
                    "timeout can be given to init_process_group",
                stuck);
  for (int r = 0; r < group_.size(); ++r)
    if (r != group_.rank() && peers[static_cast<std::size_t>(r)])
      group_.look_after(operation, r, [&] { return has_unread(r); });
} catch (...) {
  fail_all(std::current_exception());
}

void Mailboxes::fail_all(std::exception_ptr error) {
  std::vector<std::shared_ptr<Transfer>> all;
  {
    const std::lock_guard guard(lock_);
    all = matcher_.withdraw([](const Transfer&) { return true; });
    for (auto& queue : outgoing_) {
      all.insert(all.end(), queue.begin(), queue.end());
      queue.clear();
    }
    for (auto& inbox : inboxes_) {
      if (inbox.target) all.push_back(std::move(inbox.target));
      inbox = {};
    }
    failed_ = true;
  }
  for (auto& transfer : all) transfer->ticket().finish(error);
}

bool Mailboxes::busy() const {
  return !matcher_.posted().empty() ||
         std::any_of(outgoing_.begin(), outgoing_.end(), [](const auto& queue) { return !queue.empty(); }) ||
         std::any_of(inboxes_.begin(), inboxes_.end(), [](const auto& inbox) { return inbox.open; });
}

void Mailboxes::loop() {
  auto looked = Clock::now();
  std::unique_lock guard(lock_);
  while (!stopping_) {
    changed_.wait(guard, [this] { return stopping_ || (busy() && waiters_ == 0); });
    if (!stopping_) turn(guard, nullptr, {}, looked);
  }
}

void Mailboxes::stop() {
  {
    const std::lock_guard guard(lock_);
    stopping_ = true;
    changed_.notify_all();
  }
  group_.notify(group_.rank());
  if (thread_.joinable()) thread_.join();
  fail_all(std::make_exception_ptr(destroyed()));
}

}  // namespace torchrelay
