// Is a process still there? Asked by number and start time, because the kernel uses numbers again.
#pragma once

#include <cstdint>

namespace torchrelay {

struct ProcessId {
  std::int32_t pid = 0;
  std::uint64_t start_ticks = 0;  // since boot, in clock ticks

  static ProcessId current();
};

// False once the process has died, also while nobody has collected its exit status; true if /proc cannot say
// (no file descriptor is left). Costs one read in /proc.
bool alive(ProcessId process) noexcept;

}  // namespace torchrelay
