// One rank's part in a group of ranks of one host, as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "convert.h"
#include "torchrelay/collectives.h"
#include "torchrelay/executor.h"
#include "torchrelay/mailboxes.h"
#include "torchrelay/origin.h"
#include "torchrelay/shared_group.h"

namespace torchrelay {

using BlockList = std::vector<std::pair<Address, std::size_t>>;

inline std::chrono::nanoseconds seconds(double value) {
  return from_seconds<std::chrono::nanoseconds>(value);
}

inline std::vector<Block> blocks(const BlockList& list) {
  std::vector<Block> out;
  out.reserve(list.size());
  for (const auto& [address, size] : list) out.push_back({pointer(address), size});
  return out;
}

inline std::vector<std::byte*> pointers(const std::vector<Address>& list) {
  std::vector<std::byte*> out;
  out.reserve(list.size());
  for (const Address address : list) out.push_back(pointer(address));
  return out;
}

// A rank of a group with what drives it: the executor for collectives, the mailboxes for messages.
struct Parts {
  Parts(SharedMemory memory, int rank, std::vector<int> names)
      : group(std::move(memory), rank, std::move(names)), mailboxes(group) {}

  SharedGroup group;
  Executor executor;
  Mailboxes mailboxes;
};

// In a forked child, closing does nothing.
class Communicator {
 public:
  Communicator(SharedMemory& memory, int rank, std::vector<int> names, double spin_s, double yield_s)
      : parts_(make_process_owned<Parts>(SharedMemory::from_fd(memory.fd()), rank, std::move(names))),
        spin_(seconds(spin_s)),
        yield_(seconds(yield_s)) {}

  ~Communicator() {
    const nanobind::gil_scoped_release released;
    close();
  }

  void join(double timeout_s) {
    Operation operation = begin("joining the group", timeout_s, false);
    parts_->group.join(operation);
    patience_ = {spin_, parts_->group.oversubscribed() ? yield_ : std::chrono::nanoseconds{0}};
  }

  void close() {
    if (is_forked()) return;
    parts_->executor.stop();
    parts_->mailboxes.stop();
    parts_->group.leave();
  }

  // Breaks the group, as PeerLostError or OperationTimeoutError on all ranks.
  void report(const std::string& message, const std::vector<int>& names, bool timed_out) {
    if (is_forked()) return;
    parts_->group.report(timed_out ? Code::kTimeout : Code::kPeerLost, message, names);
  }

  void check(const char* operation) {
    refuse_in_child(operation);
    parts_->group.check(begin(operation, 0.0, false));
  }

  SharedGroup& group() { return parts_->group; }
  Mailboxes& mailboxes() { return parts_->mailboxes; }

  using Pending = std::shared_ptr<Ticket>;

  // Runs the collective here if it may block and nothing is queued (null), else queues it.
  template <class Collective>
  Pending run(const char* name, double timeout_s, bool block, Collective collective) {
    refuse_in_child(name);
    jobs_.fetch_add(1, std::memory_order_relaxed);
    const auto body = [this, name, timeout_s, &collective] {
      collective(parts_->group, begin(name, timeout_s, false));
    };
    if (block && parts_->executor.try_run(body)) return nullptr;
    Pending ticket =
        parts_->executor.submit([this, name, timeout_s, collective = std::move(collective)](bool) mutable {
          collective(parts_->group, begin(name, timeout_s, true));
        });
    if (block) {
      ticket->wait(seconds(1e9), check_signals);
      return nullptr;
    }
    return ticket;
  }

  Pending all_reduce(Address data, std::size_t count, Dtype dtype, Op op, double timeout_s, bool block) {
    return run("all_reduce", timeout_s, block, [=](SharedGroup& group, const Operation& operation) {
      torchrelay::all_reduce(group, operation, pointer(data), count, dtype, op);
    });
  }

  Pending reduce(Address data, std::size_t count, Dtype dtype, Op op, int root, double timeout_s,
                 bool block) {
    return run("reduce", timeout_s, block, [=](SharedGroup& group, const Operation& operation) {
      torchrelay::reduce(group, operation, pointer(data), count, dtype, op, root);
    });
  }

  Pending reduce_scatter(const std::vector<Address>& inputs, Address output, std::size_t count, Dtype dtype,
                         Op op, double timeout_s, bool block) {
    return run("reduce_scatter", timeout_s, block,
               [=, in = pointers(inputs)](SharedGroup& group, const Operation& operation) {
                 torchrelay::reduce_scatter(group, operation, in, pointer(output), count, dtype, op);
               });
  }

  Pending broadcast(Address data, std::size_t size_bytes, std::uint8_t code, int root, double timeout_s,
                    bool block) {
    return run("broadcast", timeout_s, block, [=](SharedGroup& group, const Operation& operation) {
      torchrelay::broadcast(group, operation, {pointer(data), size_bytes}, code, root);
    });
  }

  Pending all_gather(Address input, std::size_t size_bytes, const BlockList& outputs, std::uint8_t code,
                     double timeout_s, bool block) {
    return run("all_gather", timeout_s, block,
               [=, out = blocks(outputs)](SharedGroup& group, const Operation& operation) {
                 torchrelay::all_gather(group, operation, {pointer(input), size_bytes}, out, code);
               });
  }

  Pending gather(Address input, std::size_t size_bytes, const BlockList& outputs, std::uint8_t code, int root,
                 double timeout_s, bool block) {
    return run("gather", timeout_s, block,
               [=, out = blocks(outputs)](SharedGroup& group, const Operation& operation) {
                 torchrelay::gather(group, operation, {pointer(input), size_bytes}, out, code, root);
               });
  }

  Pending scatter(const BlockList& inputs, Address output, std::size_t size_bytes, std::uint8_t code,
                  int root, double timeout_s, bool block) {
    return run("scatter", timeout_s, block,
               [=, in = blocks(inputs)](SharedGroup& group, const Operation& operation) {
                 torchrelay::scatter(group, operation, in, {pointer(output), size_bytes}, code, root);
               });
  }

  Pending all_to_all(const BlockList& inputs, const BlockList& outputs, std::uint8_t code, double timeout_s,
                     bool block) {
    return run(
        "all_to_all", timeout_s, block,
        [=, in = blocks(inputs), out = blocks(outputs)](SharedGroup& group, const Operation& operation) {
          torchrelay::all_to_all(group, operation, in, out, code);
        });
  }

  Pending barrier(double timeout_s, bool block) {
    return run("barrier", timeout_s, block,
               [](SharedGroup& group, const Operation& operation) { torchrelay::barrier(group, operation); });
  }

  std::shared_ptr<Transfer> send(Address data, std::size_t size_bytes, int to, std::int32_t tag,
                                 std::uint8_t code, double timeout_s) {
    refuse_in_child("send");
    return parts_->mailboxes.send({pointer(data), size_bytes}, to, tag, code, seconds(timeout_s));
  }

  std::shared_ptr<Transfer> receive(Address data, std::size_t size_bytes, int from, std::int32_t tag,
                                    std::uint8_t code, double timeout_s) {
    refuse_in_child("recv");
    return parts_->mailboxes.receive({pointer(data), size_bytes}, from, tag, code, seconds(timeout_s));
  }

  bool wait_transfer(Transfer& transfer, double timeout_s) {
    refuse_in_child("wait");
    return parts_->mailboxes.wait(transfer, seconds(timeout_s), patience_, check_signals);
  }

  std::uint64_t jobs() const { return jobs_.load(std::memory_order_relaxed); }

 private:
  Operation begin(const char* name, double timeout_s, bool in_background) {
    Operation operation;
    operation.name = name;
    operation.timeout = seconds(timeout_s);
    operation.patience = in_background ? Patience{{}, patience_.yield} : patience_;
    if (in_background) {
      operation.poll = [this] {
        if (parts_->executor.stopping())
          throw Error(Code::kPeerLost, "the group was destroyed on this rank before the operation ended");
      };
    } else {
      operation.poll = check_signals;
    }
    return operation;
  }

  bool is_forked() const { return origin_.is_forked(); }

  // A child's operation would count as its parent's, which would then be one ahead of the other ranks.
  void refuse_in_child(const char* operation) const {
    if (is_forked())
      throw Error(
          Code::kUnavailable,
          std::string(operation) + ": this group belongs to process " + std::to_string(origin_.pid()) +
              ", from which this process was forked; start processes with spawn, or create a group in each "
              "of them");
  }

  ProcessOwned<Parts> parts_;
  Origin origin_;
  std::chrono::nanoseconds spin_;
  std::chrono::nanoseconds yield_;
  Patience patience_;
  std::atomic<std::uint64_t> jobs_{0};
};

}  // namespace torchrelay
