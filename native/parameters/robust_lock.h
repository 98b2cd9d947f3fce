// A lock in shared memory that survives the death of the process that holds it.
//
// The word holds 0, or the holder's user id + 1. A waiter spins, then yields, then checks periodically
// whether the holder's process still lives, and takes the lock from a dead one. What the dead process was
// writing may be incomplete: callers order their writes so that this affects at most one row.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace torchrelay::parameters {

inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// A holder of locks: one per worker or service thread, in the slab.
struct User {
  std::atomic<std::int32_t> pid{0};  // 0: free
  std::atomic<std::uint32_t> incarnation{0};
  std::atomic<std::uint64_t> process_start{0};  // detects a reused pid
  std::atomic<std::int64_t> clock{0};
};

bool is_alive(const User& user);

class LockGuard {
 public:
  using Word = std::atomic<std::uint32_t>;

  LockGuard(Word& word, const User* users, std::uint32_t user_id) : word_(&word) {
    std::uint32_t expected = 0;
    if (!word.compare_exchange_weak(expected, user_id + 1, std::memory_order_acquire,
                                    std::memory_order_relaxed))
      wait(word, users, user_id);
  }
  // Holds nothing, which owns() reports, if the lock is taken.
  LockGuard(Word& word, std::uint32_t user_id, std::try_to_lock_t) : word_(nullptr) {
    std::uint32_t expected = 0;
    if (word.compare_exchange_strong(expected, user_id + 1, std::memory_order_acquire)) word_ = &word;
  }
  ~LockGuard() {
    if (word_ != nullptr) word_->store(0, std::memory_order_release);
  }
  LockGuard(const LockGuard&) = delete;
  LockGuard& operator=(const LockGuard&) = delete;

  bool owns() const { return word_ != nullptr; }

 private:
  static void wait(Word& word, const User* users, std::uint32_t user_id);

  Word* word_;
};

}  // namespace torchrelay::parameters
