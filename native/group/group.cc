#include "group/group.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "core/error.h"

namespace torchrelay {
namespace {

constexpr std::chrono::hours kForever{24 * 365 * 30};

std::uint64_t total_bytes(const std::vector<Block>& blocks) {
  std::uint64_t sum = 0;
  for (const Block& block : blocks) sum += block.size_bytes;
  return sum;
}

// Of one rank's tensors, those whose sizes its call determines.
std::uint64_t payload(const Collective& call) {
  const bool fills =
      call.kind == Kind::kAllReduce || call.kind == Kind::kBroadcast || call.kind == Kind::kScatter;
  return total_bytes(fills || call.inputs.empty() ? call.outputs : call.inputs);
}

void require_blocks(const Collective& call, const std::vector<Block>& blocks, std::size_t count) {
  if (blocks.size() != count)
    throw Error(Code::kArgument, std::string(name(call.kind)) + ": " + std::to_string(blocks.size()) +
                                     " blocks where it takes " + std::to_string(count));
}

// Throws what is wrong with a call on this rank alone, before anything is sent. Other functions check the
// number of blocks of collectives that have one for each rank.
void require_valid(const Collective& call) {
  using enum Kind;
  if (is_reduction(call.kind)) find_kernel(static_cast<Dtype>(call.code), call.op);
  if (call.kind == kAllGather || call.kind == kGather || (call.kind == kAllReduce && !call.inputs.empty()))
    require_blocks(call, call.inputs, 1);
  if (is_reduction(call.kind) || call.kind == kBroadcast || call.kind == kScatter)
    require_blocks(call, call.outputs, 1);
}

template <class Ranks>
void run_one(Ranks& ranks, const Operation& operation, const Collective& call) {
  const auto& [kind, inputs, outputs, code, op, root, network, encoding] = call;
  const auto dtype = static_cast<Dtype>(code);
  const auto count = [&] { return call.outputs[0].size_bytes / size_bytes(dtype); };
  switch (kind) {
    case Kind::kAllReduce: {
      const std::byte* source = inputs.empty() ? nullptr : inputs[0].data;
      if constexpr (std::is_same_v<Ranks, HostGroup>)
        return all_reduce(ranks, operation, outputs[0].data, count(), dtype, op, source, network.get(),
                          encoding);
      else
        return all_reduce(ranks, operation, outputs[0].data, count(), dtype, op, source);
    }
    case Kind::kReduce:
      if constexpr (std::is_same_v<Ranks, HostGroup>)
        return reduce(ranks, operation, outputs[0].data, count(), dtype, op, root, encoding.compression);
      else
        return reduce(ranks, operation, outputs[0].data, count(), dtype, op, root);
    case Kind::kReduceScatter: {
      std::vector<std::byte*> sources;
      for (const Block& block : inputs) sources.push_back(block.data);
      if constexpr (std::is_same_v<Ranks, HostGroup>)
        return reduce_scatter(ranks, operation, sources, outputs[0].data, count(), dtype, op,
                              encoding.compression);
      else
        return reduce_scatter(ranks, operation, sources, outputs[0].data, count(), dtype, op);
    }
    case Kind::kBroadcast: return broadcast(ranks, operation, outputs[0], code, root);
    case Kind::kAllGather: return all_gather(ranks, operation, inputs[0], outputs, code);
    case Kind::kGather: return gather(ranks, operation, inputs[0], outputs, code, root);
    case Kind::kScatter: return scatter(ranks, operation, inputs, outputs[0], code, root);
    case Kind::kAllToAll: return all_to_all(ranks, operation, inputs, outputs, code);
    case Kind::kBarrier: return barrier(ranks, operation);
    case Kind::kNone:
    case Kind::kCoalesced: return;
  }
}

template <class Ranks>
void run_all(Ranks& ranks, int rank, const Operation& operation, std::span<const Collective> calls) {
  if (calls.size() == 1) return run_one(ranks, operation, calls[0]);
  agree(ranks, operation, coalesced_call(calls, rank));
  for (const Collective& call : calls) {
    Operation each = operation;
    each.name = name(call.kind);
    run_one(ranks, each, call);
  }
}

}  // namespace

Group::Group(SharedMemory memory, int rank, std::vector<int> names, Waiting waiting)
    : parts_(make_process_owned<Parts>(std::move(memory), rank, std::move(names))),
      waiting_(std::move(waiting)) {}

void Group::join(Timeout timeout) {
  parts_->group.join(begin("joining the group", timeout, false));
  patience_ = {waiting_.spin, parts_->group.oversubscribed() ? waiting_.yield : Timeout{0}};
}

void Group::connect(MessengerOptions options, Descriptor listener, Hosts hosts,
                    std::function<void(const Error&)> on_failure) {
  const std::size_t host = hosts.host_of(hosts.rank);
  if (host == hosts.ranks.size()) throw Error(Code::kArgument, "hosts must name each rank");
  here_ = hosts.ranks[host];
  on_failure_ = std::move(on_failure);
  messenger_ = make_process_owned<Messenger>(
      std::move(options), std::move(listener),
      [this](Block block, int source, std::int64_t tag, std::uint8_t code, Timeout timeout) {
        return parts_->mailboxes.receive(block, index_here(source), tag, code, timeout, true);
      },
      [this](const Error& error) {
        parts_->group.report(error.code(), error.what(), error.ranks());
        std::unique_lock guard(failure_lock_);
        const auto then = std::exchange(on_failure_, nullptr);
        guard.unlock();
        if (then) then(error);
      });
  hosts_.emplace(parts_->group, *messenger_, std::move(hosts));
}

Group::Pending Group::run(std::span<const Collective> calls, Timeout timeout, bool may_block) {
  const char* operation = torchrelay::name(calls.size() == 1 ? calls[0].kind : Kind::kCoalesced);
  refuse_in_child(operation);
  for (const Collective& call : calls) {
    require_valid(call);
    payload_bytes_.fetch_add(payload(call), std::memory_order_relaxed);
  }
  calls_.fetch_add(1, std::memory_order_relaxed);
  if (may_block && parts_->executor.try_run([&] { perform(calls, begin(operation, timeout, false)); }))
    return nullptr;
  Pending ticket =
      parts_->executor.submit([this, operation, timeout, own = std::vector(calls.begin(), calls.end())](
                                  bool) { perform(own, begin(operation, timeout, true)); });
  if (!may_block) return ticket;
  try {
    ticket->wait(kForever, waiting_.interrupts);
  } catch (...) {
    if (!ticket->done()) abandon(*ticket, operation);
    throw;
  }
  return nullptr;
}

void Group::perform(std::span<const Collective> calls, const Operation& operation) {
  if (hosts_)
    run_all(*hosts_, hosts_->hosts().rank, operation, calls);
  else
    run_all(parts_->group, parts_->group.rank(), operation, calls);
  completed_.fetch_add(1, std::memory_order_relaxed);
}

Operation Group::begin(const char* name, Timeout timeout, bool in_background) {
  Operation operation;
  operation.name = name;
  operation.timeout = timeout;
  operation.patience = in_background ? Patience{{}, patience_.yield} : patience_;
  operation.poll = [this, in_background] {
    if (!in_background && waiting_.interrupts) waiting_.interrupts();  // a handler may destroy the group
    if (parts_->executor.stopping()) throw destroyed();
  };
  return operation;
}

// Ends a job that uses the memory of a caller who was interrupted. Others cannot know whether it was done: it
// breaks the group, as if it had been running in the caller.
void Group::abandon(const Ticket& ticket, const char* operation) {
  const int me = parts_->group.name_of(parts_->group.rank());
  parts_->group.report(Code::kPeerLost, "rank " + std::to_string(me) + " was interrupted in " + operation,
                       {me});
  try {
    ticket.wait(kForever, {});
  } catch (...) {  // the caller throws what interrupted it
  }
}

std::shared_ptr<Transfer> Group::send(Block data, int to, std::int64_t tag, std::uint8_t code,
                                      Timeout timeout) {
  refuse_in_child("send");
  if (hosts_) hosts_->require_whole();
  payload_bytes_.fetch_add(data.size_bytes, std::memory_order_relaxed);
  if (!messenger_) return parts_->mailboxes.send(data, to, tag, code, timeout);
  const int index = index_here(to);
  if (index < 0) return messenger_->send(data, to, tag, code, timeout);
  const auto local_tag = static_cast<std::int32_t>(local_tags_.fetch_add(1) & 0x7fffffff);
  auto sent = parts_->mailboxes.send(data, index, local_tag, code, timeout);
  messenger_->announce({nullptr, data.size_bytes}, to, tag, code, local_tag);
  return sent;
}

std::shared_ptr<Transfer> Group::receive(Block data, int source, std::int64_t tag, std::uint8_t code,
                                         Timeout timeout) {
  refuse_in_child("recv");
  if (!messenger_) return parts_->mailboxes.receive(data, source, tag, code, timeout);
  hosts_->require_whole();
  return messenger_->receive(data, source, tag, code, timeout);
}

bool Group::wait(const std::shared_ptr<Transfer>& transfer, Timeout timeout) {
  refuse_in_child("wait");
  if (messenger_) return messenger_->wait(transfer, timeout, waiting_.interrupts);
  return parts_->mailboxes.wait(*transfer, timeout, patience_, waiting_.interrupts);
}

void Group::report(const Error& error) {
  if (origin_.is_forked() || closed_.load()) return;
  if (messenger_)
    messenger_->fail(error);
  else
    parts_->group.report(error.code(), error.what(), error.ranks());
}

void Group::check(const char* operation) {
  refuse_in_child(operation);
  parts_->group.check(begin(operation, {}, false));
}

void Group::close() {
  if (origin_.is_forked() || closed_.exchange(true)) return;
  if (messenger_ && parts_->executor.busy()) {
    const int me = hosts_->name();
    messenger_->fail({Code::kPeerLost,
                      "rank " + std::to_string(me) +
                          " has left the group (destroy_process_group, or its "
                          "process ended)",
                      {me}});
  }
  parts_->executor.stop();
  if (messenger_) messenger_->close();
  parts_->mailboxes.stop();
  parts_->group.leave();
  const std::lock_guard guard(failure_lock_);
  on_failure_ = nullptr;
}

Messenger& Group::messenger() {
  if (!messenger_) throw Error(Code::kArgument, "all ranks of this group are on one host");
  return *messenger_;
}

int Group::index_here(int rank) const {
  const auto found = std::ranges::find(here_, rank);
  return found == here_.end() ? -1 : static_cast<int>(found - here_.begin());
}

// A child's operation would count as its parent's, which would then be one ahead of the other ranks.
void Group::refuse_in_child(const char* operation) const {
  if (origin_.is_forked())
    throw Error(Code::kUnavailable, std::string(operation) + ": this group belongs to process " +
                                        std::to_string(origin_.pid()) +
                                        ", from which this process was forked; start processes with spawn, "
                                        "or create a group in each of them");
}

}  // namespace torchrelay
