// Whether a process is alive. Identified by pid and start time, because the kernel reuses pids.
#pragma once

#include <cstdint>

namespace torchrelay {

struct ProcessId {
  std::int32_t pid = 0;
  std::uint64_t start_ticks = 0;  // since boot, in clock ticks

  static ProcessId current();
};

// False once the process has died, even as a zombie; true if /proc cannot be
// read (no file descriptor is left). Costs one read in /proc.
bool alive(ProcessId process) noexcept;

}  // namespace torchrelay
