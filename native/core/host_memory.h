// How much memory this process may use at most.
#pragma once

#include <cstdint>

namespace torchrelay {

// The host's memory, or the limit of this process's control group if that is less.
std::uint64_t host_memory_bytes();

}  // namespace torchrelay
