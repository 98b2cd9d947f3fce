// Who uses a node's slab, and whether the table can still be used: the first process that died, or left while
// others needed it, ends it for all nodes.
#pragma once

#include <vector>

#include "parameters/slab.h"

namespace torchrelay::parameters {

class Membership {
 public:
  explicit Membership(Slab& slab) : slab_(slab), header_(slab.header()) {}

  // Takes a user id; frees the locks its dead predecessor held. Throws kArgument if it is in use.
  void join(std::uint32_t user_id);
  void leave(std::uint32_t user_id);
  // This process leaves while others still use the table.
  void abort_membership();
  // Workers of this node whose processes have died without leaving; successors may take their ids.
  std::vector<std::uint32_t> dead_workers() const;

  // A channel has failed; the first reason is kept.
  void fail(Code code, const char* reason);
  // Makes every process of every node raise, and name the loss, unless there was one before.
  void lose(const Loss& loss);
  // The process of a dead worker of this node has no successor.
  void lose_worker(std::uint32_t worker);
  Loss loss() const { return header_.loss.load(std::memory_order_acquire); }
  // Whether this node should stop serving.
  bool is_stopping() const;
  // Throws kPeerLost or kUnavailable if the table cannot be used any more.
  void check_peers() const;
  // The same, and that this node's leader lives; costs a read in /proc.
  void check_leader() const;

 private:
  void free_locks(std::uint32_t user_id);
  bool is_own_leave(const Loss& loss) const;
  [[noreturn]] void throw_loss(const Loss& loss) const;

  Slab& slab_;
  SlabHeader& header_;
};

}  // namespace torchrelay::parameters
