#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include "convert.h"
#include "register.h"
#include "torchrelay/collectives.h"
#include "torchrelay/executor.h"
#include "torchrelay/mailboxes.h"
#include "torchrelay/origin.h"
#include "torchrelay/shared_group.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace torchrelay {
namespace {

using BlockList = std::vector<std::pair<Address, std::size_t>>;

std::chrono::nanoseconds seconds(double value) { return from_seconds<std::chrono::nanoseconds>(value); }

std::vector<Block> blocks(const BlockList& list) {
  std::vector<Block> out;
  out.reserve(list.size());
  for (const auto& [address, size] : list) out.push_back({pointer(address), size});
  return out;
}

std::vector<std::byte*> pointers(const std::vector<Address>& list) {
  std::vector<std::byte*> out;
  out.reserve(list.size());
  for (const Address address : list) out.push_back(pointer(address));
  return out;
}

// A Python callable that may be called and dropped by a thread without the GIL.
std::function<void()> callback(nb::callable function) {
  const std::shared_ptr<nb::callable> held = hold(std::move(function));
  return [held] {
    const nb::gil_scoped_acquire gil;
    try {
      (*held)();
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("torchrelay: a callback at the end of an operation");
    }
  };
}

nb::object error_in_python(const std::exception_ptr& error) {
  if (!error) return nb::none();
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    return nb::make_tuple(static_cast<int>(e.code()), std::string(e.what()), e.ranks());
  }
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
    const nb::gil_scoped_release released;
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

void register_ticket(nb::module_& module) {
  nb::class_<Ticket>(module, "Ticket", "The fate of one operation.")
      .def_prop_ro("done", &Ticket::done)
      .def(
          "wait",
          [](const Ticket& ticket, double timeout_s) {
            return ticket.wait(seconds(timeout_s), check_signals);
          },
          "timeout_s"_a, Released())
      .def(
          "error", [](const Ticket& ticket) { return error_in_python(ticket.error()); },
          nb::sig("def error(self) -> tuple[int, str, list[int]] | None"),
          "What it failed with (code, message, ranks), or None.")
      .def(
          "when_done",
          [](Ticket& ticket, nb::callable function) {
            auto then = callback(std::move(function));
            const nb::gil_scoped_release released;
            ticket.when_done(std::move(then));
          },
          "function"_a, nb::sig("def when_done(self, function: collections.abc.Callable[[], None]) -> None"));
  nb::class_<Transfer>(module, "Transfer", "A send or receive in progress.")
      .def_prop_ro("ticket", &Transfer::ticket, nb::rv_policy::reference_internal)
      .def_prop_ro("source", &Transfer::source);
}

void register_reduce(nb::module_& module) {
  nb::enum_<Dtype> dtypes(module, "Dtype", "Element types that are computed with, under torch's names.");
  for (int i = 0; i < kNumDtypes; ++i) dtypes.value(kDtypeInfos[i].name, static_cast<Dtype>(i));
  register_enum<Op>(module, "Op", "Reductions, under c10d's names.", kOpNames);
  module.def("instruction_sets", &instruction_sets,
             "What reductions can use on this machine, the best first.");
  module.def(
      "reduce",
      [](const std::vector<Address>& sources, Address out, std::size_t count, Dtype dtype, Op op,
         const std::string& instruction_set) {
        const auto in = pointers(sources);
        const Kernel kernel = find_kernel(dtype, op, instruction_set);
        kernel(in.data(), static_cast<int>(in.size()), pointer(out), count);
      },
      "sources"_a, "out"_a, "count"_a, "dtype"_a, "op"_a, "instruction_set"_a, Released(),
      "Reduces `count` elements of each source into out.");
}

}  // namespace

void register_shared_group(nb::module_& module) {
  register_ticket(module);
  register_reduce(module);
  nb::class_<Communicator>(module, "Communicator", "One rank's part in a group of ranks of one host.")
      .def_static(
          "create_segment",
          [](int size, std::size_t slot_bytes, std::size_t one_shot_bytes, std::size_t mailbox_bytes) {
            return SharedGroup::create({size, slot_bytes, one_shot_bytes, mailbox_bytes});
          },
          "size"_a, "slot_bytes"_a, "one_shot_bytes"_a, "mailbox_bytes"_a)
      .def(nb::init<SharedMemory&, int, std::vector<int>, double, double>(), "memory"_a, "rank"_a, "names"_a,
           "spin_s"_a, "yield_s"_a)
      .def("join", &Communicator::join, "timeout_s"_a, Released())
      .def("close", &Communicator::close, Released())
      .def("report", &Communicator::report, "message"_a, "names"_a, "timed_out"_a, Released(),
           "Breaks the group for all ranks; the first failure counts.")
      .def("check", &Communicator::check, "operation"_a, Released(),
           "Raises if the group has failed or one of its ranks has died.")
      .def("all_reduce", &Communicator::all_reduce, "data"_a, "count"_a, "dtype"_a, "op"_a, "timeout_s"_a,
           "block"_a, Released())
      .def("reduce", &Communicator::reduce, "data"_a, "count"_a, "dtype"_a, "op"_a, "root"_a, "timeout_s"_a,
           "block"_a, Released())
      .def("reduce_scatter", &Communicator::reduce_scatter, "inputs"_a, "output"_a, "count"_a, "dtype"_a,
           "op"_a, "timeout_s"_a, "block"_a, Released())
      .def("broadcast", &Communicator::broadcast, "data"_a, "size_bytes"_a, "code"_a, "root"_a, "timeout_s"_a,
           "block"_a, Released())
      .def("all_gather", &Communicator::all_gather, "input"_a, "size_bytes"_a, "outputs"_a, "code"_a,
           "timeout_s"_a, "block"_a, Released())
      .def("gather", &Communicator::gather, "input"_a, "size_bytes"_a, "outputs"_a, "code"_a, "root"_a,
           "timeout_s"_a, "block"_a, Released())
      .def("scatter", &Communicator::scatter, "inputs"_a, "output"_a, "size_bytes"_a, "code"_a, "root"_a,
           "timeout_s"_a, "block"_a, Released())
      .def("all_to_all", &Communicator::all_to_all, "inputs"_a, "outputs"_a, "code"_a, "timeout_s"_a,
           "block"_a, Released())
      .def("barrier", &Communicator::barrier, "timeout_s"_a, "block"_a, Released())
      .def("send", &Communicator::send, "data"_a, "size_bytes"_a, "to"_a, "tag"_a, "code"_a, "timeout_s"_a,
           Released())
      .def("receive", &Communicator::receive, "data"_a, "size_bytes"_a, "source"_a, "tag"_a, "code"_a,
           "timeout_s"_a, Released())
      .def("wait_transfer", &Communicator::wait_transfer, "transfer"_a, "timeout_s"_a, Released())
      .def_prop_ro("jobs", &Communicator::jobs)
      .def_prop_ro("waiting_ns", [](Communicator& self) { return self.group().waiting_ns(); });
}

}  // namespace torchrelay
