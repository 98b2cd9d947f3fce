#include "net/delayed_network.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <random>
#include <utility>
#include <vector>

namespace torchrelay {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

struct Delivery {
  Clock::time_point due;
  std::uint64_t number;
  Message message;

  bool operator>(const Delivery& other) const {
    return std::pair(due, number) > std::pair(other.due, other.number);
  }
};

class DelayedEndpoint final : public Endpoint {
 public:
  DelayedEndpoint(std::unique_ptr<Endpoint> endpoint, const FaultInjection& faults, std::uint64_t seed)
      : endpoint_(std::move(endpoint)), faults_(faults), random_(seed) {}

  std::string address() const override { return endpoint_->address(); }
  void connect(std::uint32_t peer, const std::string& address) override { endpoint_->connect(peer, address); }
  void disconnect(std::uint32_t peer) override { endpoint_->disconnect(peer); }
  void send(std::uint32_t peer, Message message) override { endpoint_->send(peer, std::move(message)); }

  bool receive(Message& message, microseconds timeout) override {
    const auto deadline = Clock::now() + timeout;
    for (;;) {
      Message arrived;
      while (endpoint_->receive(arrived, microseconds(0))) hold(std::move(arrived));
      const auto now = Clock::now();
      if (!held_.empty() && held_.top().due <= now) {
        message = held_.top().message;
        held_.pop();
        return true;
      }
      if (now >= deadline) return false;
      const auto until = held_.empty() ? deadline : std::min(deadline, held_.top().due);
      if (endpoint_->receive(arrived, std::chrono::ceil<microseconds>(until - now))) hold(std::move(arrived));
    }
  }

 private:
  void hold(Message message) {
    const int copies = std::bernoulli_distribution(faults_.duplicate_probability)(random_) ? 2 : 1;
    for (int copy = 0; copy < copies; ++copy) {
      const double part = std::pow(std::uniform_real_distribution<double>(0, 1)(random_), 16);
      const auto longer =
          std::chrono::duration_cast<microseconds>(part * (faults_.max_delay - faults_.min_delay));
      held_.push({Clock::now() + faults_.min_delay + longer, next_number_++, message});
    }
  }

  std::unique_ptr<Endpoint> endpoint_;
  FaultInjection faults_;
  std::mt19937_64 random_;
  std::uint64_t next_number_ = 0;
  std::priority_queue<Delivery, std::vector<Delivery>, std::greater<>> held_;
};

}  // namespace

DelayedNetwork::DelayedNetwork(std::shared_ptr<Network> network, const FaultInjection& faults)
    : network_(std::move(network)), faults_(faults) {}

std::unique_ptr<Endpoint> DelayedNetwork::open(const std::string& label) {
  return std::make_unique<DelayedEndpoint>(network_->open(label), faults_, faults_.seed + opened_++);
}

}  // namespace torchrelay
