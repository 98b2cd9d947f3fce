// Collectives over several hosts: through a shared segment within each, over messages between them.
//
// H hosts with L ranks each and a message of m bytes; `leader` is one rank of each host, S as many ranks as
// the smallest host has. Bytes are those of a host's link, each way:
//
//   all_reduce      in blocks of S shares, in a pipeline: worker s of each host adds up share s of its host,
//                   sends part h of the sum to worker s of host h, adds the parts h that it gets in the order
//                   of the hosts, sends that sum to the others, and publishes the complete share to its host.
//                   2 (H-1)/H*m bytes, over S connections to each other host
//   reduce          the same, but the sums go to the root's host only
//   reduce_scatter  each host adds up the blocks of each other host's ranks and sends them to these; every
//                   rank adds what it gets, in the order of the hosts. (H-1)*L blocks
//   broadcast       one piece: from the root to the leaders; more: from host to host in a chain. m bytes
//   all_gather      each rank sends its block to one rank of each other host, and the ranks of a host gather
//                   what they got. (H-1)*L blocks
//   gather, scatter, all_to_all   through shared memory within a host, directly between ranks of two hosts
//
// Before a collective moves any bytes, all ranks agree on it: every rank gets the records of all. A payload
// that fits in the records needs no other step. The order of addition depends on the placement and the size
// alone: results have the same bits every time, on all ranks.
//
// A reduction may encode what leaves a host (compression.h): the host that adds a part up encodes the sum
// too, and keeps what the others decode. An element's error is at most that of each other host's sum and that
// of the total. A payload in the records is not encoded.
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "group/collectives.h"
#include "group/messenger.h"

namespace torchrelay {

// The sizes are equal on all ranks.
struct Hosts {
  int rank = 0;                         // in the group of all hosts
  std::vector<int> names;               // the ranks as users know them
  std::vector<std::vector<int>> ranks;  // of each host; the first is its leader
  // What one rank adds up at a time: a multiple of 64, at most its part of a slot, on every host.
  std::size_t share_bytes = 0;
  std::size_t piece_bytes = 0;   // of what is copied between hosts
  std::size_t inline_bytes = 0;  // of the payload in a record

  std::size_t host_of(int rank) const;
};

// One rank's part. The functions below are called by all ranks in the same order, from one thread at a time.
// They throw kMismatch on every rank if the calls differ. A timeout or a lost rank breaks the group of all
// hosts; all ranks throw its first failure.
class HostGroup {
 public:
  HostGroup(SharedGroup& local, Messenger& messenger, Hosts hosts)
      : local_(local), messenger_(messenger), hosts_(std::move(hosts)) {}

  SharedGroup& local() const noexcept { return local_; }
  Messenger& messenger() const noexcept { return messenger_; }
  const Hosts& hosts() const noexcept { return hosts_; }
  int name() const { return hosts_.names[static_cast<std::size_t>(hosts_.rank)]; }

  // Throws what broke the group.
  void require_whole() const;

  std::uint64_t shared_bytes() const noexcept { return shared_bytes_.load(std::memory_order_relaxed); }
  void count_shared(std::size_t size_bytes) noexcept {
    shared_bytes_.fetch_add(size_bytes, std::memory_order_relaxed);
  }

 private:
  SharedGroup& local_;
  Messenger& messenger_;
  const Hosts hosts_;
  std::atomic<std::uint64_t> shared_bytes_{0};  // moved through shared memory
};

// As in collectives.h.
void all_reduce(HostGroup& group, const Operation& operation, std::byte* data, std::size_t count, Dtype dtype,
                Op op, const std::byte* source = nullptr, const NetworkSum* network = nullptr,
                const Encoding& encoding = {});
void reduce(HostGroup& group, const Operation& operation, std::byte* data, std::size_t count, Dtype dtype,
            Op op, int root, Compression compression = Compression::kNone);
void reduce_scatter(HostGroup& group, const Operation& operation, const std::vector<std::byte*>& inputs,
                    std::byte* output, std::size_t count, Dtype dtype, Op op,
                    Compression compression = Compression::kNone);
void broadcast(HostGroup& group, const Operation& operation, Block data, std::uint8_t code, int root);
void all_gather(HostGroup& group, const Operation& operation, Block input, const std::vector<Block>& outputs,
                std::uint8_t code);
void gather(HostGroup& group, const Operation& operation, Block input, const std::vector<Block>& outputs,
            std::uint8_t code, int root);
void scatter(HostGroup& group, const Operation& operation, const std::vector<Block>& inputs, Block output,
             std::uint8_t code, int root);
void all_to_all(HostGroup& group, const Operation& operation, const std::vector<Block>& inputs,
                const std::vector<Block>& outputs, std::uint8_t code);
void barrier(HostGroup& group, const Operation& operation);
void agree(HostGroup& group, const Operation& operation, const Call& call);

}  // namespace torchrelay
