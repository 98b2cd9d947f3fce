// Collectives over a SharedGroup: each is called by all ranks, from one thread per rank, and returns when
// this rank's part is done and its buffers may be used again.
//
// Steps and bytes, for n ranks and a message of m bytes (r = read, w = written by each rank):
//   all_reduce, small   1 step: copy in m, reduce m from each of n ranks
//   all_reduce, large   blocks of a slot, three stages in a pipeline, one step a block:
//                       copy in (n-1)/n*m, reduce m/n from each of n ranks, copy out (n-1)/n*m
//   reduce              as all_reduce, but only the root copies out
//   reduce_scatter      copy in, reduce: as the first two stages
//   broadcast           the root copies in m, the others copy out m
//   all_gather, gather  each copies in its block, all (or the root) copy out all
//   all_to_all, scatter each (or the root) copies in a block a peer, each copies out its own
// Sums are made in the order of the ranks, by one rank for each element: all ranks get the same bits, every
// time.
//
// All throw kArgument, before anything is sent, if there is no rank `root` or not one block for each rank.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/compression.h"
#include "group/shared_group.h"
#include "group/transfer.h"

namespace torchrelay {

// Sums between hosts in the network; on leaders only. Both may throw.
struct NetworkSum {
  std::size_t piece_bytes = 0;
  // Starts to sum `count` elements from `first` on over the hosts.
  std::function<void(std::size_t first, std::size_t count, std::chrono::nanoseconds timeout)> start;
  std::function<void()> finish;  // waits for the oldest sum, which is then complete and divided
};

// One rank's part in a collective: what it reads and writes, as the functions below have it. `code` is that
// of the element type; of a reduction, a Dtype.
struct Collective {
  Kind kind = Kind::kBarrier;
  std::vector<Block> inputs, outputs;
  std::uint8_t code = 0;
  Op op = Op::kSum;
  int root = -1;
  std::shared_ptr<const NetworkSum> network{};  // of an all_reduce; null: hosts send each other their sums
  Encoding encoding{};                          // of a reduction between hosts
};

// The call of a rank that makes several as one; its count is a digest of all that must be equal on all ranks.
Call coalesced_call(std::span<const Collective> calls, int rank);

// data: count elements, replaced by the result; those to reduce are in `source`, if that is not null.
void all_reduce(SharedGroup& group, const Operation& operation, std::byte* data, std::size_t count,
                Dtype dtype, Op op, const std::byte* source = nullptr);

// As all_reduce in place, but only the root's data is replaced.
void reduce(SharedGroup& group, const Operation& operation, std::byte* data, std::size_t count, Dtype dtype,
            Op op, int root);

// inputs: a block of count elements for each rank; output: count elements. It may be inputs[rank].
void reduce_scatter(SharedGroup& group, const Operation& operation, const std::vector<std::byte*>& inputs,
                    std::byte* output, std::size_t count, Dtype dtype, Op op);

// `code` is the caller's code of the element type; it must be equal on all ranks.
void broadcast(SharedGroup& group, const Operation& operation, Block data, std::uint8_t code, int root);

// outputs: a block for each rank; outputs[rank] may be input itself.
void all_gather(SharedGroup& group, const Operation& operation, Block input,
                const std::vector<Block>& outputs, std::uint8_t code);

// outputs is read on the root only.
void gather(SharedGroup& group, const Operation& operation, Block input, const std::vector<Block>& outputs,
            std::uint8_t code, int root);

// inputs is read on the root only.
void scatter(SharedGroup& group, const Operation& operation, const std::vector<Block>& inputs, Block output,
             std::uint8_t code, int root);

void all_to_all(SharedGroup& group, const Operation& operation, const std::vector<Block>& inputs,
                const std::vector<Block>& outputs, std::uint8_t code);

void barrier(SharedGroup& group, const Operation& operation);

// Compares a call that moves nothing by itself.
void agree(SharedGroup& group, const Operation& operation, const Call& call);

}  // namespace torchrelay
