// Waiting for another thread or process through shared memory.
//
// A Flag is a counter that one side advances and others wait for. A waiter spins for the given time, then
// sleeps in the kernel (futex), so that more ranks than cores still progress. advance() makes a system call
// only if a waiter sleeps.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace torchrelay {

// Lives in shared memory, initially zero.
struct Flag {
  std::atomic<std::uint32_t> value{0};
  std::atomic<std::uint32_t> sleepers{0};

  // Makes all earlier writes visible to those that see the new value, and wakes the sleepers.
  void advance(std::uint32_t to) noexcept;
  // Wakes the sleepers without a new value, so that they check for failures.
  void wake() noexcept;
};

// True when `value` is at or past `target`; counters wrap.
inline bool reached(std::uint32_t value, std::uint32_t target) noexcept {
  return static_cast<std::int32_t>(value - target) >= 0;
}

// How long a wait polls before it sleeps: first without yielding, which is fastest if the awaited thread is
// running; then yielding between polls, because it may share this core.
struct Patience {
  std::chrono::nanoseconds spin{0};
  std::chrono::nanoseconds yield{0};
};

// Waits until the flag is at or past target: true, or until `slice` of sleep has passed or a wake(): false.
bool wait_for(Flag& flag, std::uint32_t target, Patience patience, std::chrono::nanoseconds slice) noexcept;

// Sleeps while the flag's value is `seen`, for at most `slice`. For flags whose every change matters.
void sleep_while(Flag& flag, std::uint32_t seen, std::chrono::nanoseconds slice) noexcept;

}  // namespace torchrelay
