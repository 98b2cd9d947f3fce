// Which rank runs on which core. The kernel mainly balances threads that wake up. If there are more ranks
// than cores and they wait without sleeping, it leaves three on one core and one on another for tens of
// milliseconds, which doubles the time of every step. If there are enough cores, it may wake two ranks on one
// core, where they take turns and never look as if they needed another, for as long as they communicate:
// steps take five times as long. So ranks move themselves.
#pragma once

#include <sched.h>

#include <vector>

namespace torchrelay {

// The core of the calling thread; negative if unknown.
int current_core() noexcept;

// The allowed core that the rank should move to, because it has at least two ranks less than the rank's own;
// else -1. Of the ranks on one core only the last moves. `cores` are those of all ranks. With more ranks than
// cores, a core without ranks is left to the kernel (`to_empty` is false), which fills it soon unless
// something else runs there.
int better_core(const std::vector<int>& cores, int rank, const cpu_set_t& allowed, bool to_empty);

// Moves the calling thread to a core, if it may run there. It stays free to go elsewhere.
void move_to(int core) noexcept;

}  // namespace torchrelay
