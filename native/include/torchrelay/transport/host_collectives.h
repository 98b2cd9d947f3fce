// Reductions over several hosts: through a shared segment within each, over messages between them.
//
// H hosts, and S ranks of each that take part between hosts: as many as the smallest host has. A message is
// cut in blocks, a block in S shares. In a pipeline, worker s of each host adds up share s of its host; sends
// part h of the sum to worker s of host h and adds the parts h that it gets, in the order of the hosts; sends
// that sum to the others; and publishes the complete share to its host. Bytes of a host's link, each way:
// 2 (H - 1) / H of the message, over S connections to each other host.
#pragma once

#include <cstddef>
#include <vector>

#include "torchrelay/shared_group.h"
#include "torchrelay/transport/messenger.h"

namespace torchrelay::transport {

struct Hosts {
  int rank = 0;                         // in the group of all hosts
  std::vector<std::vector<int>> ranks;  // of each host
  // The size of a share, equal on all ranks: a multiple of 64, at most the part of a slot that is one rank's,
  // on every host.
  std::size_t share_bytes = 0;
};

// Replaces `count` elements of data by the reduction; an average is not divided. All ranks call it with the
// same arguments. A failure breaks the group of all hosts before it is thrown.
void all_reduce(SharedGroup& group, Messenger& messenger, const Hosts& hosts, const Operation& operation,
                std::byte* data, std::size_t count, Dtype dtype, Op op);

}  // namespace torchrelay::transport
