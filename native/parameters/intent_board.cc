#include "parameters/intent_board.h"

#include "core/error.h"
#include "parameters/replica_side.h"

namespace torchrelay::parameters {
namespace {

constexpr auto kLivenessInterval = std::chrono::milliseconds(500);  // between two looks for dead workers

}  // namespace

void IntentBoard::handle_intent(const Header& header, const Message& message) {
  if (node_of(header.sender) != state_.node || index_of(header.sender) >= kMaxWorkers)
    throw Error(Code::kProtocol, "parameters: an intent from another node");
  Reader reader(message.data() + sizeof(Header), message.size_bytes() - sizeof(Header));
  const auto head = reader.take<IntentHead>();
  const auto* keys = reader.take_array<std::int64_t>(header.count);
  state_.store->value_bytes(Op::kPull, keys, header.count);  // checks the range
  Announcer& announcer = announcers_[kMaxChannels + index_of(header.sender)];
  if (announcer.incarnation != header.incarnation) {
    step(announcer.intents, kFinished);  // those of a dead predecessor
    announcer = {header.incarnation, {}};
  }
  announcer.intents.announce(head.start, head.end, {keys, keys + header.count});
}

void IntentBoard::round() {
  const auto now = ChannelState::Clock::now();
  const bool check_liveness = now >= next_liveness_check_;
  if (check_liveness) next_liveness_check_ = now + kLivenessInterval;
  busy_ = false;
  for (auto& [user_id, announcer] : announcers_) {
    const User& worker = state_.store->users()[user_id];
    const bool dead =
        worker.incarnation.load() != announcer.incarnation ||
        (check_liveness && !announcer.intents.empty() && worker.pid.load() != 0 && !is_alive(worker));
    step(announcer.intents, dead ? kFinished : worker.clock.load(std::memory_order_acquire));
    busy_ |= !announcer.intents.empty();
  }
}

void IntentBoard::step(WorkerIntents& intents, std::int64_t clock) {
  intents.round(
      clock, [this](std::int64_t key, std::int64_t clocks) { return replicas_.begin_intent(key, clocks); },
      [this](std::int64_t key) { replicas_.end_intent(key); });
}

}  // namespace torchrelay::parameters
