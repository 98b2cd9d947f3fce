// One rank's part in a group of ranks of one host, as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "convert.h"
#include "torchrelay/call.h"
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

  // Ends collectives in progress; later ones are refused.
  void stop() {
    if (!is_forked()) parts_->executor.stop();
  }

  void close() {
    if (is_forked()) return;
    stop();
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

  bool busy() { return parts_->executor.busy(); }
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
    if (!block) return ticket;
    try {
      ticket->wait(seconds(1e9), check_signals);
    } catch (...) {
      if (!ticket->done()) abandon(*ticket, name);
      throw;
    }
    return nullptr;
  }

  std::shared_ptr<Transfer> send(Address data, std::size_t size_bytes, int to, std::int64_t tag,
                                 std::uint8_t code, double timeout_s) {
    refuse_in_child("send");
    return parts_->mailboxes.send({pointer(data), size_bytes}, to, tag, code, seconds(timeout_s));
  }

  std::shared_ptr<Transfer> receive(Address data, std::size_t size_bytes, int from, std::int64_t tag,
                                    std::uint8_t code, double timeout_s) {
    refuse_in_child("recv");
    return parts_->mailboxes.receive({pointer(data), size_bytes}, from, tag, code, seconds(timeout_s));
  }

  bool wait_transfer(const std::shared_ptr<Transfer>& transfer, double timeout_s) {
    refuse_in_child("wait");
    return parts_->mailboxes.wait(*transfer, seconds(timeout_s), patience_, check_signals);
  }

  // A child's operation would count as its parent's, which would then be one ahead of the other ranks.
  void refuse_in_child(const char* operation) const {
    if (is_forked())
      throw Error(
          Code::kUnavailable,
          std::string(operation) + ": this group belongs to process " + std::to_string(origin_.pid()) +
              ", from which this process was forked; start processes with spawn, or create a group in each "
              "of them");
  }

  std::uint64_t jobs() const { return jobs_.load(std::memory_order_relaxed); }

 private:
  Operation begin(const char* name, double timeout_s, bool in_background) {
    Operation operation;
    operation.name = name;
    operation.timeout = seconds(timeout_s);
    operation.patience = in_background ? Patience{{}, patience_.yield} : patience_;
    operation.poll = [this, in_background] {
      if (!in_background) check_signals();  // a handler may destroy the group
      if (parts_->executor.stopping()) throw destroyed();
    };
    return operation;
  }

  // Ends a job that uses the memory of a caller who was interrupted. Others cannot know whether it was done:
  // it breaks the group, as if it had been running in the caller.
  void abandon(const Ticket& ticket, const char* name) {
    const int me = group().name_of(group().rank());
    group().report(Code::kPeerLost, "rank " + std::to_string(me) + " was interrupted in " + name, {me});
    try {
      ticket.wait(seconds(1e9), {});
    } catch (...) {  // the caller throws what interrupted it
    }
  }

  bool is_forked() const { return origin_.is_forked(); }

  ProcessOwned<Parts> parts_;
  Origin origin_;
  std::chrono::nanoseconds spin_;
  std::chrono::nanoseconds yield_;
  Patience patience_;
  std::atomic<std::uint64_t> jobs_{0};
};

// Collectives of a group that all ranks make as one call: none begins before all of them were compared.
template <class Group>
class Coalesced {
 public:
  std::shared_ptr<Ticket> run(const char* name, double, bool, auto collective) {
    calls_.push_back({name, std::move(collective)});
    return nullptr;
  }

  // Runs them; `digest` is of all that must be equal on all ranks. `on` has a run() as a Communicator's.
  std::shared_ptr<Ticket> run_on(auto& on, std::uint64_t digest, double timeout_s, bool block) {
    return on.run("coalesced", timeout_s, block,
                  [calls = std::move(calls_), digest](auto& group, const Operation& operation) {
                    agree(group, operation, coalesced_call(static_cast<int>(calls.size()), digest));
                    for (const auto& [name, collective] : calls) {
                      Operation each = operation;
                      each.name = name;
                      collective(group, each);
                    }
                  });
  }

 private:
  std::vector<std::pair<const char*, std::function<void(Group&, const Operation&)>>> calls_;
};

// The collectives of a Communicator, or of a class with such a run(): those of collectives.h, or their
// overloads for its group.
template <class Group>
void register_collectives(nanobind::class_<Group>& type) {
  using namespace nanobind::literals;
  type.def(
          "all_reduce",
          [](Group& self, Address data, std::size_t count, Dtype dtype, Op op, double timeout_s, bool block,
             Address source) {
            return self.run("all_reduce", timeout_s, block, [=](auto& group, const Operation& operation) {
              all_reduce(group, operation, pointer(data), count, dtype, op, pointer(source));
            });
          },
          "data"_a, "count"_a, "dtype"_a, "op"_a, "timeout_s"_a, "block"_a, "source"_a = 0, Released(),
          "Reduces `count` elements of `source`, or of `data` where that is 0, into `data`.")
      .def(
          "reduce",
          [](Group& self, Address data, std::size_t count, Dtype dtype, Op op, int root, double timeout_s,
             bool block) {
            return self.run("reduce", timeout_s, block, [=](auto& group, const Operation& operation) {
              reduce(group, operation, pointer(data), count, dtype, op, root);
            });
          },
          "data"_a, "count"_a, "dtype"_a, "op"_a, "root"_a, "timeout_s"_a, "block"_a, Released())
      .def(
          "reduce_scatter",
          [](Group& self, const std::vector<Address>& inputs, Address output, std::size_t count, Dtype dtype,
             Op op, double timeout_s, bool block) {
            return self.run("reduce_scatter", timeout_s, block,
                            [=, in = pointers(inputs)](auto& group, const Operation& operation) {
                              reduce_scatter(group, operation, in, pointer(output), count, dtype, op);
                            });
          },
          "inputs"_a, "output"_a, "count"_a, "dtype"_a, "op"_a, "timeout_s"_a, "block"_a, Released())
      .def(
          "broadcast",
          [](Group& self, Address data, std::size_t size_bytes, std::uint8_t code, int root, double timeout_s,
             bool block) {
            return self.run("broadcast", timeout_s, block, [=](auto& group, const Operation& operation) {
              broadcast(group, operation, {pointer(data), size_bytes}, code, root);
            });
          },
          "data"_a, "size_bytes"_a, "code"_a, "root"_a, "timeout_s"_a, "block"_a, Released())
      .def(
          "all_gather",
          [](Group& self, Address input, std::size_t size_bytes, const BlockList& outputs, std::uint8_t code,
             double timeout_s, bool block) {
            return self.run("all_gather", timeout_s, block,
                            [=, out = blocks(outputs)](auto& group, const Operation& operation) {
                              all_gather(group, operation, {pointer(input), size_bytes}, out, code);
                            });
          },
          "input"_a, "size_bytes"_a, "outputs"_a, "code"_a, "timeout_s"_a, "block"_a, Released())
      .def(
          "gather",
          [](Group& self, Address input, std::size_t size_bytes, const BlockList& outputs, std::uint8_t code,
             int root, double timeout_s, bool block) {
            return self.run("gather", timeout_s, block,
                            [=, out = blocks(outputs)](auto& group, const Operation& operation) {
                              gather(group, operation, {pointer(input), size_bytes}, out, code, root);
                            });
          },
          "input"_a, "size_bytes"_a, "outputs"_a, "code"_a, "root"_a, "timeout_s"_a, "block"_a, Released())
      .def(
          "scatter",
          [](Group& self, const BlockList& inputs, Address output, std::size_t size_bytes, std::uint8_t code,
             int root, double timeout_s, bool block) {
            return self.run("scatter", timeout_s, block,
                            [=, in = blocks(inputs)](auto& group, const Operation& operation) {
                              scatter(group, operation, in, {pointer(output), size_bytes}, code, root);
                            });
          },
          "inputs"_a, "output"_a, "size_bytes"_a, "code"_a, "root"_a, "timeout_s"_a, "block"_a, Released())
      .def(
          "all_to_all",
          [](Group& self, const BlockList& inputs, const BlockList& outputs, std::uint8_t code,
             double timeout_s, bool block) {
            return self.run(
                "all_to_all", timeout_s, block,
                [=, in = blocks(inputs), out = blocks(outputs)](auto& group, const Operation& operation) {
                  all_to_all(group, operation, in, out, code);
                });
          },
          "inputs"_a, "outputs"_a, "code"_a, "timeout_s"_a, "block"_a, Released())
      .def(
          "barrier",
          [](Group& self, double timeout_s, bool block) {
            return self.run("barrier", timeout_s, block,
                            [](auto& group, const Operation& operation) { barrier(group, operation); });
          },
          "timeout_s"_a, "block"_a, Released());
}

// Binds `Calls`, the Coalesced of a Group, and what both have in common.
template <class Group, class Calls>
nanobind::class_<Calls> register_communicator(nanobind::module_& module, nanobind::class_<Group>& type,
                                              const char* calls_name) {
  using namespace nanobind::literals;
  nanobind::class_<Calls> calls(module, calls_name, "Collectives that are made as one call.");
  calls.def(nanobind::init<>())
      .def("run_on", &Calls::template run_on<Group>, "on"_a, "digest"_a, "timeout_s"_a, "block"_a, Released(),
           "Runs them, once all ranks have the same number of them and the same digest, of all that must be "
           "equal.");
  register_collectives(calls);
  register_collectives(type);
  type.def("send", &Group::send, "data"_a, "size_bytes"_a, "to"_a, "tag"_a, "code"_a, "timeout_s"_a,
           Released())
      .def("receive", &Group::receive, "data"_a, "size_bytes"_a, "source"_a, "tag"_a, "code"_a, "timeout_s"_a,
           Released(), "Receives from `source`; from any rank if it is -1.")
      .def("wait_transfer", &Group::wait_transfer, "transfer"_a, "timeout_s"_a, Released(),
           "Waits for a send or receive; False: it is not done yet.")
      .def("report", &Group::report, "message"_a, "names"_a, "timed_out"_a, Released(),
           "Breaks the group for all ranks; the first failure counts.")
      .def("close", &Group::close, Released())
      .def_prop_ro("jobs", &Group::jobs);
  return calls;
}

}  // namespace torchrelay
