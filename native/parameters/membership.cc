#include "parameters/membership.h"

#include <unistd.h>

#include <cstring>
#include <string>

#include "core/error.h"

namespace torchrelay::parameters {

void Membership::join(std::uint32_t user_id) {
  User& place = slab_.users()[user_id];
  if (place.pid.load() != 0 && is_alive(place))
    throw Error(Code::kArgument, "parameters: worker " + std::to_string(user_id - kMaxChannels) +
                                     " of this node exists already, in process " +
                                     std::to_string(place.pid.load()) +
                                     "; give each worker its own worker_id");
  if (place.pid.load() != 0) free_locks(user_id);  // its holder died, maybe holding one
  place.process_start = ProcessId::current().start_ticks;
  ++place.incarnation;
  place.clock = 0;
  place.pid = getpid();
}

void Membership::free_locks(std::uint32_t user_id) {
  const auto free = [user_id](std::atomic<std::uint32_t>& lock) {
    std::uint32_t expected = user_id + 1;
    lock.compare_exchange_strong(expected, 0);
  };
  for (std::uint64_t i = 0; i < header_.num_entries; ++i)
    free(slab_.entry(static_cast<std::int64_t>(i)).lock);
  for (std::uint32_t i = 0; i < header_.num_classes; ++i) free(slab_.pool(i).lock);
  free(header_.index_lock);
}

void Membership::leave(std::uint32_t user_id) {
  slab_.users()[user_id].clock = kFinished;
  slab_.users()[user_id].pid = 0;
}

void Membership::fail(Code code, const char* reason) {
  std::uint32_t expected = 0;
  if (!header_.failed.compare_exchange_strong(expected, 1)) return;
  header_.failure_code = code;
  std::strncpy(header_.failure, reason, sizeof header_.failure - 1);
  header_.failed.store(2, std::memory_order_release);
  lose({Loss::kFailed, static_cast<std::uint16_t>(header_.node), getpid()});
}

void Membership::lose(const Loss& loss) {
  Loss none;
  header_.loss.compare_exchange_strong(none, loss);
}

void Membership::abort_membership() {
  lose({Loss::kLeft, static_cast<std::uint16_t>(header_.node), getpid()});
}

void Membership::lose_worker(std::uint32_t worker) {
  lose({Loss::kKilled, static_cast<std::uint16_t>(header_.node),
        slab_.users()[kMaxChannels + worker].pid.load()});
}

bool Membership::is_stopping() const {
  const Loss lost = loss();
  return header_.stopping.load(std::memory_order_relaxed) != 0 ||
         (lost.how != Loss::kNone && lost.node == header_.node);
}

bool Membership::is_own_leave(const Loss& loss) const {
  return loss.how == Loss::kLeft && loss.node == header_.node && loss.process == getpid();
}

// A loss is why others then leave or shut down, so it is what is named; it is read after what it causes.
void Membership::check_peers() const {
  const std::uint32_t departed_node = header_.departed_node.load(std::memory_order_acquire);
  const bool stopping = header_.stopping.load(std::memory_order_acquire) != 0;
  const Loss lost = loss();
  if (lost.how != Loss::kNone && !is_own_leave(lost)) throw_loss(lost);
  if (stopping || lost.how != Loss::kNone)
    throw Error(Code::kUnavailable, "parameters: node " + std::to_string(header_.node) +
                                        " has been shut down; nothing can be read or written any more");
  if (departed_node != 0) throw_loss({Loss::kLeft, static_cast<std::uint16_t>(departed_node - 1), 0});
}

void Membership::throw_loss(const Loss& loss) const {
  const bool here = loss.node == header_.node;
  if (here && loss.how == Loss::kFailed) throw Error(header_.failure_code, header_.failure);
  const std::string node = "node " + std::to_string(loss.node);
  const std::string process = loss.process == 0 ? "it" : "process " + std::to_string(loss.process);
  const std::string lost =
      "parameters: " + node + " is lost (noticed by node " + std::to_string(header_.node) + "): " + process;
  std::string text;
  switch (loss.how) {
    case Loss::kNone:
    case Loss::kUnreachable:
      text = lost + " died, or could not be reached for longer than transport.peer_timeout_s";
      break;
    case Loss::kLeft:
      text = here ? "parameters: " + process + " of " + node + " has left while others still needed it"
                  : lost + " has left, or shut down, while others still needed it";
      text += "; see its own output for why";
      break;
    case Loss::kKilled:
      text = "parameters: " + process + " of " + node + " has died, and no other has taken its place";
      break;
    case Loss::kFailed: text = lost + " cannot serve it any more; see its own output for why"; break;
  }
  throw Error(Code::kPeerLost, text + "; restart from the last checkpoint", {static_cast<int>(loss.node)});
}

void Membership::check_leader() const {
  check_peers();
  const ProcessId& leader = header_.leader;
  if (alive(leader)) return;
  check_peers();  // why it ended
  throw Error(Code::kPeerLost,
              "parameters: process " + std::to_string(leader.pid) + ", which serves node " +
                  std::to_string(header_.node) + ", has died; restart from the last checkpoint",
              {static_cast<int>(header_.node)});
}

std::vector<std::uint32_t> Membership::dead_workers() const {
  std::vector<std::uint32_t> dead;
  for (std::uint32_t worker = 0; worker < kMaxWorkers; ++worker) {
    const User& user = slab_.users()[kMaxChannels + worker];
    if (user.pid.load() != 0 && !is_alive(user)) dead.push_back(worker);
  }
  return dead;
}

}  // namespace torchrelay::parameters
