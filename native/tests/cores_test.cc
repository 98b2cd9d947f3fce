#include "core/cores.h"

#include "check.h"

using namespace torchrelay;

namespace {

cpu_set_t set_of(const std::vector<int>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  return set;
}

const cpu_set_t kTwo = set_of({0, 1});

}  // namespace

TEST(a_rank_leaves_a_core_with_two_more) {
  CHECK(better_core({0, 0, 0, 1}, 2, kTwo, false) == 1);
  CHECK(better_core({1, 1, 0, 1}, 3, kTwo, false) == 0);
  CHECK(better_core({0, 0, 0, 0, 1, 1, 2}, 3, set_of({0, 1, 2}), false) == 2);
}

TEST(only_the_last_of_a_core_leaves) {
  CHECK(better_core({0, 0, 0, 0, 1}, 0, kTwo, false) == -1);
  CHECK(better_core({0, 0, 0, 0, 1}, 2, kTwo, false) == -1);
  CHECK(better_core({0, 0, 0, 0, 1}, 3, kTwo, false) == 1);
}

TEST(ranks_stay_where_moving_gains_nothing) {
  CHECK(better_core({0, 0, 1, 1}, 1, kTwo, false) == -1);
  CHECK(better_core({0, 0, 1}, 1, kTwo, false) == -1);
  CHECK(better_core({0, 0, 0, 1}, 3, kTwo, false) == -1);
}

TEST(a_core_without_ranks_is_left_to_the_kernel) { CHECK(better_core({0, 0, 0, 0}, 3, kTwo, false) == -1); }

TEST(a_rank_leaves_a_shared_core_for_an_empty_one) {
  CHECK(better_core({0, 0}, 1, kTwo, true) == 1);
  CHECK(better_core({0, 0}, 0, kTwo, true) == -1);
  CHECK(better_core({0, 1}, 1, kTwo, true) == -1);
  CHECK(better_core({0, 0, 1}, 1, set_of({0, 1}), true) == -1);
  CHECK(better_core({0, 0, 1}, 1, set_of({0, 1, 2}), true) == 2);
}

TEST(ranks_go_only_where_they_may) {
  CHECK(better_core({0, 0, 0, 5}, 2, set_of({0}), false) == -1);
  CHECK(better_core({0, 0, 0, 5}, 2, set_of({0, 5}), false) == 5);
}

TEST(moving_leaves_a_thread_free_to_go_elsewhere) {
  cpu_set_t before, after;
  CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &before)) move_to(core);
  move_to(CPU_SETSIZE - 1);
  CHECK(sched_getaffinity(0, sizeof after, &after) == 0);
  CHECK(CPU_EQUAL(&before, &after));
}
