#include "net/memory_network.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/error.h"

namespace torchrelay {
namespace {

struct Mailbox {
  std::string label;
  std::mutex mutex;
  std::condition_variable arrived;
  std::deque<Message> queue;
  std::atomic<bool> cut = false;
};

}  // namespace

struct MemoryNetwork::Shared {
  std::mutex mutex;
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
    {
      const std::lock_guard guard(shared_->mutex);
      const auto found = shared_->mailboxes.find(address->second);
      if (found == shared_->mailboxes.end()) return;  // gone, as a closed port
      mailbox = found->second;
    }
    const std::lock_guard guard(mailbox->mutex);
    if (mailbox->cut || inbox_->cut) return;
    mailbox->queue.push_back(std::move(message));
    mailbox->arrived.notify_one();
  }

  bool receive(Message& message, std::chrono::microseconds timeout) override {
    std::unique_lock lock(inbox_->mutex);
    if (!inbox_->arrived.wait_for(lock, timeout, [this] { return !inbox_->queue.empty(); })) return false;
    message = std::move(inbox_->queue.front());
    inbox_->queue.pop_front();
    return true;
  }

 private:
  std::shared_ptr<MemoryNetwork::Shared> shared_;
  std::string address_;
  std::shared_ptr<Mailbox> inbox_;
  std::unordered_map<std::uint32_t, std::string> peers_;
};

}  // namespace

MemoryNetwork::MemoryNetwork() : shared_(std::make_shared<Shared>()) {}

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
