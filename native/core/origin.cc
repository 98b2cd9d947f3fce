#include "core/origin.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace torchrelay {
namespace {

// Counted, because asking for the process's id costs a system call.
std::atomic<int>& forks() {
  static std::atomic<int> count{0};
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); });
  return count;
}

}  // namespace

Origin::Origin() : pid_(static_cast<std::int32_t>(getpid())), forks_(forks().load()) {}

bool Origin::is_forked() const noexcept { return forks().load(std::memory_order_relaxed) != forks_; }

}  // namespace torchrelay
