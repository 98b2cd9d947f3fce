#include "parameters/robust_lock.h"

#include <sched.h>

#include <chrono>
#include <thread>

#include "core/liveness.h"

namespace torchrelay::parameters {
namespace {

constexpr int kSpins = 200;
constexpr int kYields = 200;
constexpr auto kNap = std::chrono::milliseconds(2);

}  // namespace

bool is_alive(const User& user) {
  const std::int32_t pid = user.pid.load();
  return pid != 0 && alive({pid, user.process_start.load()});
}

void LockGuard::wait(Word& word, const User* users, std::uint32_t user_id) {
  for (int turn = 0;; ++turn) {
    std::uint32_t expected = 0;
    if (word.compare_exchange_weak(expected, user_id + 1, std::memory_order_acquire,
                                   std::memory_order_relaxed))
      return;
    if (turn < kSpins) {
      cpu_relax();
    } else if (turn < kSpins + kYields) {
      sched_yield();
    } else {
      if (expected != 0 && !is_alive(users[expected - 1]) &&
          word.compare_exchange_strong(expected, user_id + 1, std::memory_order_acquire))
        return;
      std::this_thread::sleep_for(kNap);
    }
  }
}

}  // namespace torchrelay::parameters
