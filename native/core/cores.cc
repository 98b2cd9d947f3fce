#include "core/cores.h"

#include <algorithm>

namespace torchrelay {

int current_core() noexcept { return sched_getcpu(); }

int better_core(const std::vector<int>& cores, int rank, const cpu_set_t& allowed, bool to_empty) {
  const auto self = cores.begin() + rank;
  if (std::find(self + 1, cores.end(), *self) != cores.end()) return -1;
  const auto ranks_on = [&](int core) { return std::count(cores.begin(), cores.end(), core); };
  auto fewest = ranks_on(*self) - 1;
  int best = -1;
  for (int core = 0; core < CPU_SETSIZE && fewest > 0; ++core) {
    if (!CPU_ISSET(core, &allowed)) continue;
    if (const auto ranks = ranks_on(core); (to_empty || ranks > 0) && ranks < fewest) {
      fewest = ranks;
      best = core;
    }
  }
  return best;
}

void move_to(int core) noexcept {
  cpu_set_t before;
  if (sched_getaffinity(0, sizeof before, &before) != 0 || !CPU_ISSET(core, &before)) return;
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  if (sched_setaffinity(0, sizeof only, &only) == 0) (void)sched_setaffinity(0, sizeof before, &before);
}

}  // namespace torchrelay
