// Which rank runs on which core. The kernel finds a better core mainly for who wakes up; ranks that wait
// without sleeping, and are more than the cores, it leaves for tens of milliseconds with three on one core
// and one on another, where every meeting takes twice as long. So they look for themselves.
#pragma once

#include <sched.h>

#include <vector>

namespace torchrelay {

// Where the calling thread runs now; negative if that is not known.
int current_core() noexcept;

// The allowed core that the rank should move to, because it has at least two ranks less than the rank's own;
// else -1. A core without ranks is left to the kernel, which fills it soon unless something else runs there.
// Of the ranks on one core only the last moves. `cores` are those of all ranks.
int better_core(const std::vector<int>& cores, int rank, const cpu_set_t& allowed);

// Moves the calling thread to a core, if it may run there. It stays free to go elsewhere.
void move_to(int core) noexcept;

}  // namespace torchrelay
