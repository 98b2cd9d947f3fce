#include "group/shared_group.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "core/cores.h"
#include "core/error.h"

namespace torchrelay {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kMagic = 0x3130'7961'6c65'7274;  // "trelay01"
constexpr std::size_t kLine = 64;
constexpr std::size_t kPage = 4096;
// How often a rank looks whether its core has too many. Moving takes as long as a few steps.
constexpr std::uint32_t kStepsPerMove = 16;

std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

std::string text(const char* format, double value) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, format, value);
  return buffer;
}

std::string list(const std::vector<int>& ranks) {
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) out += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return out;
}

}  // namespace

// Where in its rings a rank published its data of a step, in lines.
struct Post {
  std::uint32_t slot;
  std::uint32_t result;
};

// The counter, the calls and the posts of both parities, and the core on which the rank last arrived, share a
// cache line: a waiter fetches them together.
struct alignas(kLine) SharedGroup::RankState {
  Flag arrived;
  Call calls[2];
  Post posts[2];
  std::atomic<std::int32_t> core{-1};
  alignas(kLine) Flag mail;
  std::atomic<std::int32_t> pid{0};
  std::atomic<std::uint64_t> start_ticks{0};
  std::atomic<std::uint32_t> left{0};
  cpu_set_t cores;
};

struct alignas(kLine) SharedGroup::Head {
  std::uint64_t magic;
  std::int32_t size;
  std::uint64_t slot_bytes;
  std::uint64_t one_shot_bytes;
  std::uint64_t mailbox_bytes;
  std::uint64_t ring_bytes;
  // The first failure: 0 none, 1 being written, 2 written.
  alignas(kLine) std::atomic<std::uint32_t> failure{0};
  std::int32_t code;
  std::int32_t culprit;
  std::int32_t reporter;
  // Of a reported failure; empty for one of the group's own.
  std::uint32_t reason_bytes;
  std::uint32_t reason_names;
  char reason[kMaxReason];
  std::int32_t names[kMaxReasonNames];
};

double Operation::elapsed_s() const { return std::chrono::duration<double>(Clock::now() - start).count(); }

SharedGroup::Layout SharedGroup::layout(const Shape& shape) {
  const auto n = static_cast<std::size_t>(shape.size);
  const std::size_t share = round_up((shape.slot_bytes + n - 1) / n, kLine) + kLine;
  // Three: one that is read, one that is written, and what is left over at the end of the ring.
  const auto ring = [&](std::size_t size) {
    return round_up(std::max(3 * round_up(size, kLine), shape.ring_bytes / n), kPage);
  };
  Layout at{};
  at.tables = sizeof(Head) + n * sizeof(RankState);
  at.mailboxes = round_up(at.tables + n * 2 * round_up(2 * n * sizeof(std::uint64_t), kLine), kPage);
  at.slots = round_up(at.mailboxes + n * n * round_up(shape.mailbox_bytes, kPage), kPage);
  at.slot_ring = ring(shape.slot_bytes);
  at.results = at.slots + n * at.slot_ring;
  at.result_ring = ring(share);
  at.total = at.results + n * at.result_ring;
  return at;
}

SharedMemory SharedGroup::create(const Shape& shape) {
  if (shape.size < 1 || shape.size > kMaxSize)
    throw Error(Code::kArgument, "a group of " + std::to_string(shape.size) + " ranks on one host: 1 to " +
                                     std::to_string(kMaxSize) + " are possible");
  if (shape.slot_bytes < kPage || shape.one_shot_bytes > shape.slot_bytes)
    throw Error(Code::kArgument,
                "a slot needs at least 4096 bytes, and one_shot_bytes must not be larger than a slot");
  auto memory = SharedMemory::create(layout(shape).total, "torchrelay-group");
  auto* head = new (memory.data()) Head{};
  head->size = shape.size;
  head->slot_bytes = shape.slot_bytes;
  head->one_shot_bytes = shape.one_shot_bytes;
  head->mailbox_bytes = shape.mailbox_bytes;
  head->ring_bytes = shape.ring_bytes;
  head->magic = kMagic;
  return memory;
}

SharedGroup::SharedGroup(SharedMemory memory, int rank, std::vector<int> names)
    : memory_(std::move(memory)), rank_(rank), names_(std::move(names)) {
  const Head& h = head();
  if (memory_.size_bytes() < sizeof(Head) || h.magic != kMagic)
    throw Error(Code::kProtocol, "this segment holds no group, or one of another version of torchrelay");
  shape_ = {h.size, h.slot_bytes, h.one_shot_bytes, h.mailbox_bytes, h.ring_bytes};
  if (rank < 0 || rank >= shape_.size || names_.size() != static_cast<std::size_t>(shape_.size))
    throw Error(Code::kArgument, "rank " + std::to_string(rank) + " does not fit a group of " +
                                     std::to_string(shape_.size) + " ranks");
  at_ = layout(shape_);
  // It fails on machines with more cores than cpu_set_t has bits; all cores are assumed then.
  cpu_set_t& cores = state(rank_).cores;
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) std::memset(&cores, 0xFF, sizeof cores);
  const ProcessId process = ProcessId::current();
  state(rank_).start_ticks.store(process.start_ticks, std::memory_order_relaxed);
  state(rank_).pid.store(process.pid, std::memory_order_release);
}

SharedGroup::~SharedGroup() { leave(); }

void SharedGroup::leave() noexcept {
  if (left_.exchange(true)) return;
  state(rank_).left.store(1, std::memory_order_release);
  state(rank_).arrived.wake();
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank_) notify(peer);
}

SharedGroup::Head& SharedGroup::head() const noexcept { return *reinterpret_cast<Head*>(memory_.data()); }

SharedGroup::RankState& SharedGroup::state(int rank) const noexcept {
  return reinterpret_cast<RankState*>(memory_.data() + sizeof(Head))[rank];
}

namespace {

// The next `size` bytes in a ring, which is not the last one's.
std::size_t advance(std::size_t& cursor, std::size_t size, std::size_t ring) noexcept {
  if (cursor + size > ring) cursor = 0;
  const std::size_t at = cursor;
  cursor += round_up(size, kLine);
  return at;
}

}  // namespace

std::byte* SharedGroup::next_slot(std::size_t size_bytes) noexcept {
  const std::size_t at = advance(slot_cursor_, size_bytes, at_.slot_ring);
  state(rank_).posts[(step_ + 1) % 2].slot = static_cast<std::uint32_t>(at / kLine);
  return slots(rank_) + at;
}

std::byte* SharedGroup::next_result(std::size_t size_bytes) noexcept {
  const std::size_t at = advance(result_cursor_, size_bytes, at_.result_ring);
  state(rank_).posts[(step_ + 1) % 2].result = static_cast<std::uint32_t>(at / kLine);
  return results(rank_) + at;
}

const std::byte* SharedGroup::slot(int rank) const noexcept {
  return slots(rank) + state(rank).posts[step_ % 2].slot * kLine;
}

const std::byte* SharedGroup::result(int rank) const noexcept {
  return results(rank) + state(rank).posts[step_ % 2].result * kLine;
}

std::byte* SharedGroup::mailbox(int from, int to) const noexcept {
  const auto index =
      static_cast<std::size_t>(from) * static_cast<std::size_t>(shape_.size) + static_cast<std::size_t>(to);
  return memory_.data() + at_.mailboxes + index * round_up(shape_.mailbox_bytes, kPage);
}

std::uint64_t* SharedGroup::table(int rank) const noexcept {
  const auto n = static_cast<std::size_t>(shape_.size);
  const std::size_t row = round_up(2 * n * sizeof(std::uint64_t), kLine);
  return reinterpret_cast<std::uint64_t*>(memory_.data() + at_.tables +
                                          (static_cast<std::size_t>(rank) * 2 + call_count_ % 2) * row);
}

void SharedGroup::require_rank(const char* operation, int rank) const {
  if (rank >= 0 && rank < size()) return;
  throw Error(Code::kArgument, "rank " + std::to_string(name_of(rank_)) + ", " + operation +
                                   ": there is no rank " + std::to_string(rank) + " in a group of " +
                                   std::to_string(size()));
}

void SharedGroup::join(const Operation& operation) { arrive_and_wait(operation); }

bool SharedGroup::oversubscribed() const noexcept {
  cpu_set_t all = state(0).cores;
  for (int r = 1; r < size(); ++r) CPU_OR(&all, &all, &state(r).cores);
  return CPU_COUNT(&all) < size();
}

void SharedGroup::synchronize(const Operation& operation) { arrive_and_wait(operation); }

void SharedGroup::synchronize(const Operation& operation, const Call& call) {
  throw_if_broken(operation);
  ++call_count_;
  state(rank_).calls[call_count_ % 2] = call;
  arrive_and_wait(operation);
  compare_calls(operation, call);
}

std::size_t SharedGroup::synchronize(const Operation& operation, const Call& call,
                                     const std::vector<std::size_t>& sends,
                                     const std::vector<std::size_t>& receives) {
  throw_if_broken(operation);
  ++call_count_;
  state(rank_).calls[call_count_ % 2] = call;
  const auto n = static_cast<std::size_t>(size());
  std::copy(sends.begin(), sends.end(), table(rank_));
  std::copy(receives.begin(), receives.end(), table(rank_) + n);
  arrive_and_wait(operation);
  compare_calls(operation, call);
  std::size_t largest = 0;
  for (std::size_t from = 0; from < n; ++from)
    for (std::size_t to = 0; to < n; ++to) {
      const std::size_t sent = table(static_cast<int>(from))[to];
      const std::size_t expected = table(static_cast<int>(to))[n + from];
      if (sent != expected)
        throw Error(Code::kMismatch, prefix(operation) + "the ranks do not agree on sizes: rank " +
                                         std::to_string(names_[from]) + " sends " + std::to_string(sent) +
                                         " bytes to rank " + std::to_string(names_[to]) + ", which expects " +
                                         std::to_string(expected) +
                                         "; check the shapes and split sizes on both");
      largest = std::max(largest, sent);
    }
  return largest;
}

void SharedGroup::compare_calls(const Operation& operation, const Call& mine) {
  const auto call_of = [this](int peer) -> const Call& { return state(peer).calls[call_count_ % 2]; };
  int peer = 0;
  while (peer < size() && call_of(peer) == mine) ++peer;
  if (peer == size()) return;
  std::vector<Call> calls;
  for (int r = 0; r < size(); ++r) calls.push_back(call_of(r));
  throw Error(Code::kMismatch, prefix(operation) + describe_difference(calls, names_));
}

void SharedGroup::arrive_and_wait(const Operation& operation) {
  throw_if_broken(operation);
  if (head().failure.load(std::memory_order_relaxed) != 0) hear_failure(operation);
  const std::uint32_t target = ++step_;
  state(rank_).core.store(current_core(), std::memory_order_relaxed);
  if (step_ % kStepsPerMove == 0) spread_out(operation.patience);
  state(rank_).arrived.advance(target);
  // First for those on this core, because they need it.
  for (const bool near_only : {true, false})
    for (int i = 1; i < size(); ++i) {
      const int peer = (rank_ + i) % size();
      if (!reached(state(peer).arrived.value.load(std::memory_order_acquire), target) &&
          (!near_only || shares_core(peer)))
        wait_for_rank(operation, peer, target);
    }
}

bool SharedGroup::shares_core(int peer) const noexcept {
  return state(peer).core.load(std::memory_order_relaxed) ==
         state(rank_).core.load(std::memory_order_relaxed);
}

void SharedGroup::spread_out(Patience patience) {
  const bool are_more_than_cores = patience.yield.count() > 0;
  if (!are_more_than_cores && patience.spin.count() == 0) return;  // it is not a user's thread that waits
  std::vector<int> cores;
  for (int r = 0; r < size(); ++r) cores.push_back(state(r).core.load(std::memory_order_relaxed));
  if (const int core = better_core(cores, rank_, state(rank_).cores, !are_more_than_cores); core >= 0)
    move_to(core);
}

void SharedGroup::wait_for_rank(const Operation& operation, int peer, std::uint32_t target) {
  const auto start = Clock::now();
  Patience patience = operation.patience;
  if (shares_core(peer)) patience.spin = {};
  const auto has_arrived = [&] {
    return reached(state(peer).arrived.value.load(std::memory_order_acquire), target);
  };
  while (!wait_for(state(peer).arrived, target, patience, kSlice)) {
    patience = {};
    look_after(operation, peer, has_arrived);
    if (has_arrived()) break;
    if (Clock::now() - operation.start >= operation.timeout) {
      const auto absent = missing(target);
      if (absent.empty()) break;
      fail(Code::kTimeout,
           prefix(operation) + list(absent) + " did not arrive within " +
               text("%.3g s", std::chrono::duration<double>(operation.timeout).count()) +
               "; is it stuck, slow, or in another call? A longer timeout can be given to init_process_group",
           peer);
    }
  }
  waiting_ns_.fetch_add(static_cast<std::uint64_t>((Clock::now() - start).count()),
                        std::memory_order_relaxed);
}

// Throws if another rank has reported that the group failed.
void SharedGroup::hear_failure(const Operation& operation) {
  if (head().failure.load(std::memory_order_acquire) != 2) return;
  const Head& h = head();
  if (h.reason_bytes != 0) {
    const auto code = static_cast<Code>(h.code);
    const std::string message = prefix(operation) + std::string(h.reason, h.reason_bytes);
    const std::vector<int> names(h.names, h.names + h.reason_names);
    set_broken(code, message, names);
    throw Error(code, message, names);
  }
  const auto culprit = static_cast<std::size_t>(h.culprit);
  const bool lost = static_cast<Code>(h.code) != Code::kTimeout;
  fail(lost ? Code::kPeerLost : Code::kTimeout,
       prefix(operation) + "rank " + std::to_string(names_[static_cast<std::size_t>(h.reporter)]) +
           (lost ? " reports that rank " + std::to_string(names_[culprit]) + " is lost"
                 : " gave up waiting for rank " + std::to_string(names_[culprit])) +
           "; this group cannot be used any more",
       h.culprit);
}

void SharedGroup::look_after(const Operation& operation, int peer, const std::function<bool()>& has_arrived) {
  throw_if_broken(operation);
  hear_failure(operation);
  const bool dead = is_dead(peer), left = has_left(peer);
  if ((left || dead) && !(has_arrived && has_arrived())) lose(operation, peer, left);
  if (!operation.poll) return;
  try {
    operation.poll();
  } catch (const Error& error) {
    try {
      fail(error.code(), prefix(operation) + error.what(), rank_);
    } catch (const Error&) {
      throw error;
    }
  }
}

bool SharedGroup::is_dead(int peer) const noexcept {
  const RankState& other = state(peer);
  const std::int32_t pid = other.pid.load(std::memory_order_acquire);
  return pid != 0 && !alive({pid, other.start_ticks.load(std::memory_order_relaxed)});
}

void SharedGroup::lose(const Operation& operation, int peer, bool has_left) {
  fail(Code::kPeerLost,
       prefix(operation) + "rank " + std::to_string(name_of(peer)) +
           (has_left ? " has left the group (destroy_process_group, or its process ended)"
                     : " (process " + std::to_string(state(peer).pid.load(std::memory_order_relaxed)) +
                           ") has died; look at its own output for the cause"),
       peer);
}

void SharedGroup::check(const Operation& operation) {
  throw_if_broken(operation);
  hear_failure(operation);
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank_ && is_dead(peer) && !has_left(peer)) lose(operation, peer, false);
}

std::vector<int> SharedGroup::missing(std::uint32_t target) const {
  std::vector<int> absent;
  for (int r = 0; r < size(); ++r)
    if (!reached(state(r).arrived.value.load(std::memory_order_acquire), target))
      absent.push_back(name_of(r));
  return absent;
}

std::string SharedGroup::prefix(const Operation& operation) const {
  return "rank " + std::to_string(name_of(rank_)) + ", " + operation.name + " #" +
         std::to_string(call_count_) + ", after " + text("%.3g s: ", operation.elapsed_s());
}

bool SharedGroup::claim_failure() noexcept {
  std::uint32_t none = 0;
  return head().failure.compare_exchange_strong(none, 1);
}

void SharedGroup::wake_all() noexcept {
  for (int r = 0; r < size(); ++r) {
    state(r).arrived.wake();
    notify(r);
  }
}

void SharedGroup::set_broken(Code code, const std::string& message, const std::vector<int>& names) {
  const std::lock_guard guard(broken_lock_);
  if (broken_.load()) return;
  broken_code_ = code == Code::kInterrupted ? Code::kPeerLost : code;
  broken_why_ = message;
  broken_ranks_ = names;
  broken_.store(true);
}

void SharedGroup::fail(Code code, const std::string& message, int culprit) {
  if (claim_failure()) {
    Head& h = head();
    h.code = static_cast<std::int32_t>(code);
    h.culprit = culprit;
    h.reporter = rank_;
    h.failure.store(2, std::memory_order_release);
  }
  wake_all();
  const std::vector<int> ranks = {name_of(culprit)};
  set_broken(code, message, ranks);
  throw Error(code, message, ranks);
}

void SharedGroup::report(Code code, const std::string& message, const std::vector<int>& names) noexcept {
  if (!claim_failure()) return;
  Head& h = head();
  h.code = static_cast<std::int32_t>(code);
  h.reason_bytes = static_cast<std::uint32_t>(message.copy(h.reason, kMaxReason));
  h.reason_names = static_cast<std::uint32_t>(std::min(names.size(), kMaxReasonNames));
  std::copy_n(names.begin(), h.reason_names, h.names);
  h.failure.store(2, std::memory_order_release);
  wake_all();
}

void SharedGroup::throw_if_broken(const Operation& operation) {
  if (!broken_.load(std::memory_order_acquire)) return;
  const std::lock_guard guard(broken_lock_);
  throw Error(broken_code_,
              prefix(operation) +
                  "this group failed before and cannot be used any more. The cause was: " + broken_why_,
              broken_ranks_);
}

std::uint32_t SharedGroup::mail() const noexcept {
  return state(rank_).mail.value.load(std::memory_order_acquire);
}

void SharedGroup::notify(int peer) noexcept {
  Flag& flag = state(peer).mail;
  flag.value.fetch_add(1, std::memory_order_seq_cst);
  if (flag.sleepers.load(std::memory_order_seq_cst) != 0) flag.wake();
}

void SharedGroup::await_mail(std::uint32_t seen, Patience patience) noexcept {
  const auto start = Clock::now();
  // The sender may need this core.
  if (patience.yield.count() > 0) patience.spin = {};
  wait_for(state(rank_).mail, seen + 1, patience, kSlice);
  waiting_ns_.fetch_add(static_cast<std::uint64_t>((Clock::now() - start).count()),
                        std::memory_order_relaxed);
}

bool SharedGroup::has_left(int rank) const noexcept {
  return state(rank).left.load(std::memory_order_acquire) != 0;
}

}  // namespace torchrelay
