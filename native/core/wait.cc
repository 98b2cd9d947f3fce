#include "core/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace torchrelay {
namespace {

using Clock = std::chrono::steady_clock;

// While spinning, the clock is read once in so many looks at the flag.
constexpr int kLooksPerClock = 64;

void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Not FUTEX_PRIVATE: the waiters are other processes.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen,
                std::chrono::nanoseconds slice) noexcept {
  timespec time{};
  time.tv_sec = static_cast<time_t>(slice.count() / 1'000'000'000);
  time.tv_nsec = static_cast<long>(slice.count() % 1'000'000'000);
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, seen, &time, nullptr, 0);
}

template <class Pause>
bool look_until(const Flag& flag, std::uint32_t target, Clock::time_point end, int looks,
                Pause pause) noexcept {
  do {
    for (int i = 0; i < looks; ++i) {
      if (reached(flag.value.load(std::memory_order_acquire), target)) return true;
      pause();
    }
  } while (Clock::now() < end);
  return false;
}

}  // namespace

void Flag::wake() noexcept {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&value), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// A sleeper raises `sleepers` and then looks at `value`; we set `value` and then look at `sleepers`.
// Sequential consistency makes sure that one of the two sees the other.
void Flag::advance(std::uint32_t to) noexcept {
  value.store(to, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) wake();
}

void sleep_while(Flag& flag, std::uint32_t seen, std::chrono::nanoseconds slice) noexcept {
  flag.sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (flag.value.load(std::memory_order_seq_cst) == seen) futex_wait(flag.value, seen, slice);
  flag.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

bool wait_for(Flag& flag, std::uint32_t target, Patience patience, std::chrono::nanoseconds slice) noexcept {
  std::uint32_t value = flag.value.load(std::memory_order_acquire);
  if (reached(value, target)) return true;
  const auto start = Clock::now();
  if (patience.spin.count() > 0 && look_until(flag, target, start + patience.spin, kLooksPerClock, relax))
    return true;
  if (patience.yield.count() > 0 &&
      look_until(flag, target, start + patience.spin + patience.yield, 1, [] { sched_yield(); }))
    return true;
  value = flag.value.load(std::memory_order_acquire);
  if (reached(value, target)) return true;
  sleep_while(flag, value, slice);
  return reached(flag.value.load(std::memory_order_acquire), target);
}

}  // namespace torchrelay
