#include "torchrelay/memory_network.h"

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <queue>
#include <random>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torchrelay/error.h"

namespace torchrelay {
namespace {

using Clock = std::chrono::steady_clock;

struct Delivery {
  Clock::time_point due;
  std::uint64_t number;
  Message message;

  bool operator>(const Delivery& other) const {
    return std::pair(due, number) > std::pair(other.due, other.number);
  }
};

struct Mailbox {
  std::string label;
  std::mutex mutex;
  std::condition_variable arrived;
  std::priority_queue<Delivery, std::vector<Delivery>, std::greater<>> queue;
  std::atomic<bool> cut = false;
};

}  // namespace

struct MemoryNetwork::Shared {
  FaultInjection faults;
  std::mutex mutex;
  std::mt19937_64 random;
  std::uint64_t next_number = 0;
  std::unordered_map<std::string, std::shared_ptr<Mailbox>> mailboxes;
  std::unordered_set<std::string> cut;
};

namespace {

class MemoryEndpoint : public Endpoint {
 public:
  MemoryEndpoint(std::shared_ptr<MemoryNetwork::Shared> shared, std::string address,
                 std::shared_ptr<Mailbox> inbox)
      : shared_(std::move(shared)), address_(std::move(address)), inbox_(std::move(inbox)) {}

  ~MemoryEndpoint() override {
    const std::lock_guard guard(shared_->mutex);
    shared_->mailboxes.erase(address_);
  }

  std::string address() const override { return address_; }
  void connect(std::uint32_t peer, const std::string& address) override { peers_[peer] = address; }
  void disconnect(std::uint32_t peer) override { peers_.erase(peer); }

  void send(std::uint32_t peer, Message message) override {
    const auto address = peers_.find(peer);
    if (address == peers_.end())
      throw Error(Code::kArgument, "memory network: peer " + std::to_string(peer) + " was not connected");
    std::shared_ptr<Mailbox> mailbox;
    std::vector<Delivery> deliveries;
    {
      const std::lock_guard guard(shared_->mutex);
      const auto found = shared_->mailboxes.find(address->second);
      if (found == shared_->mailboxes.end()) return;  // gone, as a closed port
      mailbox = found->second;
      const bool twice = std::bernoulli_distribution(shared_->faults.duplicate_probability)(shared_->random);
      for (int copy = 0; copy <= (twice ? 1 : 0); ++copy) deliveries.push_back(make_delivery(message));
    }
    const std::lock_guard guard(mailbox->mutex);
    if (mailbox->cut || inbox_->cut) return;
    for (Delivery& delivery : deliveries) mailbox->queue.push(std::move(delivery));
    mailbox->arrived.notify_one();
  }

  bool receive(Message& message, std::chrono::microseconds timeout) override {
    std::unique_lock lock(inbox_->mutex);
    const auto deadline = Clock::now() + timeout;
    for (;;) {
      auto& queue = inbox_->queue;
      const auto now = Clock::now();
      if (!queue.empty() && queue.top().due <= now) {
        message = queue.top().message;
        queue.pop();
        return true;
      }
      if (now >= deadline) return false;
      const Clock::time_point until = queue.empty() ? deadline : std::min(deadline, queue.top().due);
      inbox_->arrived.wait_until(lock, until);
    }
  }

 private:
  // Under the network's mutex. Without delay all are due at once, in the order sent.
  Delivery make_delivery(const Message& message) {
    Clock::time_point due{};
    if (shared_->faults.max_delay.count() > 0) due = Clock::now() + shared_->faults.delay(shared_->random);
    return {due, shared_->next_number++, message};
  }

  std::shared_ptr<MemoryNetwork::Shared> shared_;
  std::string address_;
  std::shared_ptr<Mailbox> inbox_;
  std::unordered_map<std::uint32_t, std::string> peers_;
};

}  // namespace

std::chrono::microseconds FaultInjection::delay(std::mt19937_64& random) const {
  constexpr double kSteepness = 16;
  const double part = std::pow(std::uniform_real_distribution<double>(0, 1)(random), kSteepness);
  return min_delay + std::chrono::duration_cast<std::chrono::microseconds>(part * (max_delay - min_delay));
}

MemoryNetwork::MemoryNetwork(const FaultInjection& faults) : shared_(std::make_shared<Shared>()) {
  shared_->faults = faults;
  shared_->random.seed(faults.seed);
}

MemoryNetwork::~MemoryNetwork() = default;

std::unique_ptr<Endpoint> MemoryNetwork::open(const std::string& label) {
  const std::lock_guard guard(shared_->mutex);
  auto mailbox = std::make_shared<Mailbox>();
  mailbox->label = label;
  mailbox->cut = shared_->cut.contains(label);
  const std::string address = "memory:" + label + ":" + std::to_string(shared_->next_number++);
  shared_->mailboxes[address] = mailbox;
  return std::make_unique<MemoryEndpoint>(shared_, address, std::move(mailbox));
}

void MemoryNetwork::cut(const std::string& label) {
  const std::lock_guard guard(shared_->mutex);
  shared_->cut.insert(label);
  for (const auto& [address, mailbox] : shared_->mailboxes) {
    if (mailbox->label != label) continue;
    const std::lock_guard mailbox_guard(mailbox->mutex);
    mailbox->cut = true;
  }
}

}  // namespace torchrelay
