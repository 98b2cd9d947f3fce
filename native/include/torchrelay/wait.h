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

// How long a wait keeps its core before it sleeps.
struct Patience {
  std::chrono::nanoseconds spin{0};  // looking at the flag all the time: fastest, burns the core
  int yields = 0;                    // then this many times letting others run first
};

// Waits until the flag is at or past target: true, or until `slice` of sleep has passed or a wake(): false.
bool wait_for(Flag& flag, std::uint32_t target, Patience patience, std::chrono::nanoseconds slice) noexcept;

// Sleeps while the flag's value is `seen`, for at most `slice`. For flags whose every change matters.
void sleep_while(Flag& flag, std::uint32_t seen, std::chrono::nanoseconds slice) noexcept;

}  // namespace torchrelay
