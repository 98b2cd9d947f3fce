// Waiting for another thread or process through shared memory.
//
// A Flag is a counter that one side advances and others wait for. A waiter spins for as long as it was told
// to, then sleeps in the kernel (futex), so that more ranks than cores do not melt. advance() costs no system
// call while nobody sleeps.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace torchrelay {

// Lies in shared memory, zero at first.
struct Flag {
  std::atomic<std::uint32_t> value{0};
  std::atomic<std::uint32_t> sleepers{0};

  // Makes everything written before it visible to whoever sees the new value, and wakes the sleepers.
  void advance(std::uint32_t to) noexcept;
  // Wakes the sleepers without a new value, so that they look around.
  void wake() noexcept;
};

// True when `value` is at or past `target`; counters wrap.
inline bool reached(std::uint32_t value, std::uint32_t target) noexcept {
  return static_cast<std::int32_t>(value - target) >= 0;
}

// How long a wait goes on before it sleeps: first it does nothing but look at the flag, which is fastest if
// whom it waits for runs now; then it lets others run between two looks, because they may share its core.
struct Patience {
  std::chrono::nanoseconds spin{0};
  std::chrono::nanoseconds yield{0};
};

// Waits until the flag is at or past target: true, or until `slice` of sleep has passed or a wake(): false.
bool wait_for(Flag& flag, std::uint32_t target, Patience patience, std::chrono::nanoseconds slice) noexcept;

// Sleeps while the flag's value is `seen`, for at most `slice`. For flags whose every change matters.
void sleep_while(Flag& flag, std::uint32_t seen, std::chrono::nanoseconds slice) noexcept;

}  // namespace torchrelay
