#include "torchrelay/parameters/robust_lock.h"

#include <sched.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

namespace torchrelay::parameters {
namespace {

constexpr int kSpins = 200;
constexpr int kYields = 200;
constexpr auto kNap = std::chrono::milliseconds(2);

}  // namespace

std::uint64_t process_start(std::int32_t pid) {
  char text[1024];
  std::FILE* file = std::fopen(("/proc/" + std::to_string(pid) + "/stat").c_str(), "re");
  if (file == nullptr) return 0;
  const std::size_t size = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[size] = '\0';
  const char* rest = std::strrchr(text, ')');  // the command may hold blanks and parentheses
  char state = 'Z';
  unsigned long long start = 0;
  if (rest == nullptr ||
      std::sscanf(rest + 1,
                  " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state,
                  &start) != 2)
    return 0;
  return state == 'Z' || state == 'X' ? 0 : start;
}

bool is_alive(const User& user) {
  const std::int32_t pid = user.pid.load();
  return pid != 0 && process_start(pid) == user.process_start.load();
}

void LockGuard::wait(const User* users, std::uint32_t user) {
  for (int turn = 0;; ++turn) {
    std::uint32_t expected = 0;
    if (word_.compare_exchange_weak(expected, user + 1, std::memory_order_acquire, std::memory_order_relaxed))
      return;
    if (turn < kSpins) {
      cpu_relax();
    } else if (turn < kSpins + kYields) {
      sched_yield();
    } else {
      if (expected != 0 && !is_alive(users[expected - 1]) &&
          word_.compare_exchange_strong(expected, user + 1, std::memory_order_acquire))
        return;
      std::this_thread::sleep_for(kNap);
    }
  }
}

}  // namespace torchrelay::parameters
