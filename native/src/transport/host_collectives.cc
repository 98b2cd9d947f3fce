#include "torchrelay/transport/host_collectives.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>

namespace torchrelay::transport {
namespace {

constexpr std::size_t kLine = 64;
// The stages of a block; each is one iteration behind the one before.
constexpr std::size_t kCombine = 1, kPublish = 3;
constexpr std::int32_t kParts = -4, kSums = -5;  // tags; those of users are not negative
// Whoever waits for the cause of a delay names it; those behind it wait this much longer.
constexpr std::chrono::seconds kGrace{2};

class AllReduce {
 public:
  AllReduce(SharedGroup& group, Messenger& messenger, const Hosts& hosts, const Operation& operation,
            std::byte* data, std::size_t size_bytes, Dtype dtype, Op op)
      : group_(group),
        messenger_(messenger),
        hosts_(hosts),
        operation_(operation),
        deadline_(operation.start + operation.timeout + kGrace),
        data_(data),
        size_(size_bytes),
        item_(torchrelay::size_bytes(dtype)),
        kernel_(find_kernel(dtype, op)) {
    operation_.timeout += 2 * kGrace;
    workers_ = hosts.ranks[0].size();
    for (std::size_t host = 0; host < hosts.ranks.size(); ++host) {
      workers_ = std::min(workers_, hosts.ranks[host].size());
      if (std::ranges::find(hosts.ranks[host], hosts.rank) != hosts.ranks[host].end()) host_ = host;
    }
    mine_ = static_cast<std::size_t>(group.rank());
    block_ = hosts.share_bytes * workers_;
    if (hosts.share_bytes == 0 || hosts.share_bytes % kLine != 0 || block_ > group.shape().slot_bytes)
      throw Error(Code::kArgument, "shares of " + std::to_string(hosts.share_bytes) +
                                       " bytes do not fit slots of " +
                                       std::to_string(group.shape().slot_bytes));
    for (auto& stage : stages_) stage.parts.resize(works() ? hosts.share_bytes * hosts.ranks.size() : 0);
  }

  void run() {
    const std::size_t blocks = (size_ + block_ - 1) / block_;
    for (std::size_t i = 0; i < blocks + kPublish; ++i) {
      if (i < blocks) copy_in(i);
      if (i >= kPublish && works()) publish(i - kPublish);
      group_.synchronize(operation_);
      if (i < blocks && works()) exchange_parts(i);
      if (i >= kCombine && i - kCombine < blocks && works()) combine(i - kCombine);
      if (i >= kPublish) copy_out(i - kPublish);
    }
    for (auto& stage : stages_) finish(stage.sent);
  }

 private:
  struct Span {
    std::size_t start, size;  // bytes; in the message
  };
  using Transfers = std::vector<std::shared_ptr<Transfer>>;
  struct Stage {
    std::vector<std::byte> parts;
    Transfers receiving_parts, receiving_sums, sent;
  };

  bool works() const { return mine_ < workers_; }
  Stage& stage(std::size_t block) { return stages_[block % stages_.size()]; }

  Span share(std::size_t block, std::size_t worker) const {
    const std::size_t start = block * block_, length = std::min(block_, size_ - start);
    const std::size_t size = (length + workers_ * kLine - 1) / (workers_ * kLine) * kLine;
    const std::size_t from = std::min(length, worker * size);
    return {start + from, std::min(size, length - from)};
  }

  // The part of a share that a host adds up.
  Span part(const Span& share, std::size_t host) const {
    const std::size_t count = share.size / item_, all = hosts_.ranks.size();
    const std::size_t from = count * host / all, to = count * (host + 1) / all;
    return {share.start + from * item_, (to - from) * item_};
  }

  // Publishes the shares that other ranks of this host add up.
  void copy_in(std::size_t block) {
    std::byte* slot = group_.next_slot(block_);
    const std::size_t start = block * block_;
    for (std::size_t worker = 0; worker < workers_; ++worker) {
      const Span span = share(block, worker);
      if (worker != mine_ && span.size != 0)
        std::memcpy(slot + (span.start - start), data_ + span.start, span.size);
    }
  }

  void exchange_parts(std::size_t block) {
    Stage& now = stage(block);
    finish(now.sent);
    const Span own = share(block, mine_);
    if (group_.size() > 1 && own.size != 0) {
      std::vector<const std::byte*> sources;
      for (int rank = 0; rank < group_.size(); ++rank)
        sources.push_back(rank == group_.rank() ? data_ + own.start
                                                : group_.slot(rank) + (own.start - block * block_));
      kernel_(sources.data(), group_.size(), data_ + own.start, own.size / item_);
    }
    const Span kept = part(own, host_);
    std::byte* into = now.parts.data();
    for (std::size_t host = 0; host < hosts_.ranks.size(); ++host) {
      if (host == host_) continue;
      receive(now.receiving_parts, host, kParts, into, kept.size);
      into += kept.size;
      const Span away = part(own, host);
      send(now.sent, host, kParts, away);
      // It comes after that host has got our part of it.
      receive(now.receiving_sums, host, kSums, data_ + away.start, away.size);
    }
  }

  void combine(std::size_t block) {
    Stage& now = stage(block);
    finish(now.receiving_parts);
    const Span kept = part(share(block, mine_), host_);
    if (kept.size == 0) return;
    std::vector<const std::byte*> sources;
    const std::byte* from = now.parts.data();
    for (std::size_t host = 0; host < hosts_.ranks.size(); ++host) {
      sources.push_back(host == host_ ? data_ + kept.start : from);
      if (host != host_) from += kept.size;
    }
    kernel_(sources.data(), static_cast<int>(sources.size()), data_ + kept.start, kept.size / item_);
    for (std::size_t host = 0; host < hosts_.ranks.size(); ++host)
      if (host != host_) send(now.sent, host, kSums, kept);
  }

  void publish(std::size_t block) {
    finish(stage(block).receiving_sums);
    const Span own = share(block, mine_);
    std::byte* result = group_.next_result(own.size);
    if (group_.size() > 1 && own.size != 0) std::memcpy(result, data_ + own.start, own.size);
  }

  void copy_out(std::size_t block) {
    for (std::size_t i = 0; i < workers_; ++i) {
      const std::size_t worker = (mine_ + i) % workers_;
      const Span span = share(block, worker);
      if (worker != mine_ && span.size != 0)
        std::memcpy(data_ + span.start, group_.result(static_cast<int>(worker)), span.size);
    }
  }

  int counterpart(std::size_t host) const { return hosts_.ranks[host][mine_]; }

  void send(Transfers& transfers, std::size_t host, std::int32_t tag, const Span& span) {
    if (span.size == 0) return;
    transfers.push_back(messenger_.send({data_ + span.start, span.size}, counterpart(host), tag, 0, {}));
  }

  void receive(Transfers& transfers, std::size_t host, std::int32_t tag, std::byte* into, std::size_t size) {
    if (size == 0) return;
    transfers.push_back(messenger_.receive({into, size}, counterpart(host), tag, 0, {}));
  }

  void finish(Transfers& transfers) {
    for (const auto& transfer : transfers)
      messenger_.complete(transfer, operation_.name, deadline_, [this] {
        if (operation_.poll) operation_.poll();
        group_.check(operation_);
      });
    transfers.clear();
  }

  SharedGroup& group_;
  Messenger& messenger_;
  const Hosts& hosts_;
  Operation operation_;  // in shared memory
  const Messenger::Clock::time_point deadline_;
  std::byte* data_;
  std::size_t size_, item_;
  Kernel kernel_;
  std::size_t workers_, host_ = 0, mine_, block_;
  std::array<Stage, kPublish + 1> stages_;
};

}  // namespace

void all_reduce(SharedGroup& group, Messenger& messenger, const Hosts& hosts, const Operation& operation,
                std::byte* data, std::size_t count, Dtype dtype, Op op) {
  if (count == 0) return;
  const Op partial = op == Op::kAverage ? Op::kSum : op;
  AllReduce reduction(group, messenger, hosts, operation, data, count * size_bytes(dtype), dtype, partial);
  try {
    reduction.run();
  } catch (const Error& error) {
    const bool is_failure = error.code() == Code::kTimeout || error.code() == Code::kPeerLost;
    const int me = group.name_of(group.rank());
    messenger.fail(is_failure
                       ? error
                       : Error(Code::kPeerLost,
                               "rank " + std::to_string(me) + " was interrupted in " + operation.name, {me}));
    throw;
  }
}

}  // namespace torchrelay::transport
