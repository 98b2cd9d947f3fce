#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "convert.h"
#include "core/error.h"
#include "group/group.h"
#include "register.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace torchrelay {
namespace {

using Addresses = std::vector<std::pair<std::string, std::uint16_t>>;
using BlockList = std::vector<std::pair<Address, std::size_t>>;

std::chrono::nanoseconds seconds(double value) { return from_seconds<std::chrono::nanoseconds>(value); }

std::vector<Block> blocks(const BlockList& list) {
  std::vector<Block> out;
  out.reserve(list.size());
  for (const auto& [address, size] : list) out.push_back({pointer(address), size});
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

// What Python raises can be thrown once; an Error, in a ticket, as often as somebody waits. The caller's own
// thread, in which signal handlers raise, has no ticket.
template <class... Arguments>
nb::object call(std::thread::id caller, const nb::callable& function, Arguments... arguments) {
  try {
    return function(arguments...);
  } catch (const nb::python_error& raised) {
    if (std::this_thread::get_id() == caller) throw;
    const auto type = nb::cast<std::string>(raised.type().attr("__name__"));
    throw Error(Code::kUnavailable, type + ": " + nb::str(raised.value()).c_str());
  }
}

class PythonGroup : public Group {
 public:
  using Group::Group;

  ~PythonGroup() {
    const nb::gil_scoped_release released;
    close();
  }
};

void make_group(PythonGroup* self, SharedMemory& memory, int rank, std::vector<int> names, double spin_s,
                double yield_s) {
  new (self) PythonGroup(SharedMemory::from_fd(memory.fd()), rank, std::move(names),
                         {seconds(spin_s), seconds(yield_s), check_signals});
}

void connect(PythonGroup& self, int rank, std::vector<int> names, const Addresses& addresses,
             std::vector<std::vector<int>> hosts, int listener, const nb::bytes& token,
             std::shared_ptr<net::Tls> tls, std::size_t share_bytes, std::size_t piece_bytes,
             std::size_t inline_bytes, nb::callable on_failure) {
  Descriptor owned(listener);
  MessengerOptions options;
  if (token.size() != options.token.size())
    throw Error(Code::kArgument, "a token has " + std::to_string(options.token.size()) + " bytes, not " +
                                     std::to_string(token.size()));
  std::memcpy(options.token.data(), token.c_str(), token.size());
  options.tls = std::move(tls);
  options.rank = rank;
  options.names = names;
  options.hosts = hosts;
  for (const auto& [host, port] : addresses) options.addresses.push_back({host, port});
  self.connect(std::move(options), std::move(owned),
               {rank, std::move(names), std::move(hosts), share_bytes, piece_bytes, inline_bytes},
               [report = hold(std::move(on_failure))](const Error& error) {
                 const nb::gil_scoped_acquire gil;
                 const nb::error_scope raised_before;  // the failure may be that this
                                                       // thread was interrupted
                 try {
                   (*report)(error);
                 } catch (nb::python_error& raised) {
                   raised.discard_as_unraisable("torchrelay: reporting a failure");
                 }
               });
}

// Lets others sum between hosts.
void go_through(Collective& self, std::size_t piece_bytes, nb::callable start, nb::callable finish) {
  const auto caller = std::this_thread::get_id();
  self.network = std::make_shared<const NetworkSum>(
      NetworkSum{piece_bytes,
                 [caller, begin = hold(std::move(start))](std::size_t first, std::size_t elements,
                                                          std::chrono::nanoseconds left) {
                   const nb::gil_scoped_acquire gil;
                   const std::chrono::duration<double> left_s = left;
                   call(caller, *begin, first, elements, left_s.count());
                 },
                 [caller, end = hold(std::move(finish))] {
                   const nb::gil_scoped_acquire gil;
                   const nb::object failure = call(caller, *end);
                   if (!failure.is_none()) throw Error(nb::cast<const Error&>(failure));
                 }});
}

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
          "when_done",
          [](Ticket& ticket, nb::callable function) {
            auto then = callback(std::move(function));
            const nb::gil_scoped_release released;
            ticket.when_done(std::move(then));
          },
          "function"_a,
          nb::sig("def when_done(self, function: collections.abc.Callable[[], "
                  "None]) -> None"));
  nb::class_<Transfer>(module, "Transfer", "A send or receive in progress.")
      .def_prop_ro("ticket", &Transfer::ticket, nb::rv_policy::reference_internal)
      .def_prop_ro("source", &Transfer::source)
      .def_prop_ro("tag", &Transfer::tag)
      .def_prop_ro("size_bytes", &Transfer::size_bytes);
  nb::class_<Error>(module, "Failure", "Why a group cannot be used any more.")
      .def(
          "__init__",
          [](Error* self, const std::string& message, std::vector<int> ranks, bool timed_out) {
            new (self) Error(timed_out ? Code::kTimeout : Code::kPeerLost, message, std::move(ranks));
          },
          "message"_a, "ranks"_a, "timed_out"_a)
      .def_prop_ro("message", [](const Error& self) { return std::string(self.what()); })
      .def_prop_ro("ranks", [](const Error& self) { return self.ranks(); })
      .def_prop_ro("timed_out", [](const Error& self) { return self.code() == Code::kTimeout; });
}

void register_collective(nb::module_& module) {
  nb::enum_<Dtype> dtypes(module, "Dtype", "Element types, under torch's names.");
  for (int i = 0; i < kNumDtypes; ++i) dtypes.value(kDtypeInfos[i].name, static_cast<Dtype>(i));
  register_enum<Op>(module, "Op", "Reductions, under c10d's names.", kOpNames);
  module.def("reduces", &reduces, "dtype"_a, "op"_a, "Whether the reduction is defined and supported.");
  register_enum<Kind>(module, "Kind", "Collectives.", kKindNames);
  register_enum<Compression>(module, "Compression", "How sums are encoded between hosts.", kCompressionNames);
  nb::class_<Collective>(module, "Collective", "One rank's part in a collective.")
      .def(
          "__init__",
          [](Collective* self, Kind kind, const BlockList& inputs, const BlockList& outputs,
             std::uint8_t code, Op op,
             int root) { new (self) Collective{kind, blocks(inputs), blocks(outputs), code, op, root}; },
          "kind"_a, "inputs"_a = BlockList(), "outputs"_a = BlockList(), "code"_a = 0, "op"_a = Op::kSum,
          "root"_a = -1,
          "Of address and bytes of each block: all_reduce, reduce and "
          "broadcast have one output, which is "
          "the input too; all_reduce may have another input. `code` is that of "
          "the element type: of a "
          "reduction, a Dtype.")
      .def(
          "compress",
          [](Collective& self, Compression compression, Address lost) {
            self.encoding = {compression, reinterpret_cast<float*>(pointer(lost))};
          },
          "compression"_a, "lost"_a = 0,
          "Encodes what a reduction sends to other hosts. `lost`, if not 0, is the address of a float32 for "
          "each element of an all_reduce: it gets what this rank's encodings lost of the sum, and keeps its "
          "values elsewhere.")
      .def("go_through", &go_through, "piece_bytes"_a, "start"_a, "finish"_a,
           nb::sig("def go_through(self, piece_bytes: int, start: "
                   "collections.abc.Callable[[int, int, float], "
                   "None], finish: collections.abc.Callable[[], Failure | "
                   "None]) -> None"),
           "Lets others sum an all_reduce between hosts: the leaders call "
           "`start(first, count, timeout_s)` "
           "for each piece, and `finish()` to wait for the oldest sum, which "
           "divides averages too.");
}

void register_calls(nb::class_<PythonGroup>& type) {
  type.def(
          "run",
          [](PythonGroup& self, const std::vector<Collective>& calls, double timeout_s, bool may_block) {
            return self.run(calls, seconds(timeout_s), may_block);
          },
          "calls"_a, "timeout_s"_a, "may_block"_a, Released(),
          "Runs collectives; several are one call, of which none begins before "
          "all ranks agree on all.")
      .def(
          "all_reduce",
          [](PythonGroup& self, Address data, std::size_t size_bytes, std::uint8_t code, Op op,
             Address source, double timeout_s) {
            Collective call{Kind::kAllReduce, {}, {{pointer(data), size_bytes}}, code, op};
            if (source != data) call.inputs = {{pointer(source), size_bytes}};
            self.run({&call, 1}, seconds(timeout_s), true);
          },
          "data"_a, "size_bytes"_a, "code"_a, "op"_a, "source"_a, "timeout_s"_a, Released(),
          "Runs an all_reduce of one tensor, blocking, by the shortest path.")
      .def(
          "send",
          [](PythonGroup& self, Address data, std::size_t size_bytes, int to, std::int64_t tag,
             std::uint8_t code, double timeout_s) {
            return self.send({pointer(data), size_bytes}, to, tag, code, seconds(timeout_s));
          },
          "data"_a, "size_bytes"_a, "to"_a, "tag"_a, "code"_a, "timeout_s"_a, Released())
      .def(
          "receive",
          [](PythonGroup& self, Address data, std::size_t size_bytes, int source, std::int64_t tag,
             std::uint8_t code, double timeout_s) {
            return self.receive({pointer(data), size_bytes}, source, tag, code, seconds(timeout_s));
          },
          "data"_a, "size_bytes"_a, "source"_a, "tag"_a, "code"_a, "timeout_s"_a, Released(),
          "Receives from `source`; from any rank if it is -1.")
      .def(
          "wait_transfer",
          [](PythonGroup& self, const std::shared_ptr<Transfer>& transfer, double timeout_s) {
            return self.wait(transfer, seconds(timeout_s));
          },
          "transfer"_a, "timeout_s"_a, Released(), "Waits for a send or receive; False: it is not done yet.");
}

void register_membership(nb::class_<PythonGroup>& type) {
  type.def(
          "join", [](PythonGroup& self, double timeout_s) { self.join(seconds(timeout_s)); }, "timeout_s"_a,
          Released(), "Waits until all ranks of this host have joined.")
      .def("connect", &connect, "rank"_a, "names"_a, "addresses"_a, "hosts"_a, "listener"_a, "token"_a,
           "tls"_a.none(), "share_bytes"_a, "piece_bytes"_a, "inline_bytes"_a, "on_failure"_a,
           nb::sig("def connect(self, rank: int, names: "
                   "collections.abc.Sequence[int], addresses: "
                   "collections.abc.Sequence[tuple[str, int]], hosts: "
                   "collections.abc.Sequence[collections.abc.Sequence[int]], "
                   "listener: int, token: bytes, "
                   "tls: Tls | None, share_bytes: int, piece_bytes: int, "
                   "inline_bytes: int, on_failure: "
                   "collections.abc.Callable[[Failure], None]) -> None"),
           "Makes this rank one of a group of several hosts. `names[r]` is how "
           "users know rank r, "
           "`addresses[r]` where it listens, `hosts` the ranks of each host. "
           "`listener` is the descriptor of "
           "a listening socket, which is owned from now on; `token` the "
           "group's secret, and `tls` encrypts "
           "what leaves the host. `on_failure` is called once, when the group "
           "breaks here or a peer reports "
           "that it broke, in any thread. The sizes, equal on all ranks, are "
           "described in "
           "host_collectives.h.")
      .def(
          "report",
          [](PythonGroup& self, const std::string& message, std::vector<int> names, bool timed_out) {
            self.report({timed_out ? Code::kTimeout : Code::kPeerLost, message, std::move(names)});
          },
          "message"_a, "names"_a, "timed_out"_a, Released(),
          "Breaks the group for all ranks; the first failure counts.")
      .def(
          "check", [](PythonGroup& self, const char* operation) { self.check(operation); }, "operation"_a,
          Released(),
          "Raises if the group has failed or one of this host's ranks has "
          "died.")
      .def(
          "lost",
          [](PythonGroup& self, const std::vector<int>& ranks) { return self.messenger().lost(ranks); },
          "ranks"_a, Released(),
          "The failure for the first of `ranks` whose connection ended without "
          "a farewell.")
      .def(
          "with_host",
          [](PythonGroup& self, const Error& failure, int peer) {
            return self.messenger().with_host(failure, peer);
          },
          "failure"_a, "peer"_a, Released(),
          "Names also the ranks of a lost rank's host that cannot be reached "
          "either.")
      .def("close", &PythonGroup::close, Released());
}

}  // namespace

void register_group(nb::module_& module) {
  register_ticket(module);
  register_collective(module);
  nb::class_<PythonGroup> type(module, "Group",
                               "One rank's part in a group: of the ranks of a "
                               "host, or, once it is connected, "
                               "of several. Thread-safe.");
  type.def_static(
          "create_segment",
          [](int size, std::size_t slot_bytes, std::size_t one_shot_bytes, std::size_t mailbox_bytes) {
            return SharedGroup::create({size, slot_bytes, one_shot_bytes, mailbox_bytes});
          },
          "size"_a, "slot_bytes"_a, "one_shot_bytes"_a, "mailbox_bytes"_a)
      .def("__init__", &make_group, "memory"_a, "rank"_a, "names"_a, "spin_s"_a, "yield_s"_a)
      .def_prop_ro("calls", &PythonGroup::calls)
      .def_prop_ro("completed", &PythonGroup::completed, "The calls that have ended without an error.")
      .def_prop_ro("payload_bytes", &PythonGroup::payload_bytes)
      .def_prop_ro("shared_ns", &PythonGroup::shared_ns, "The time in which it waited in shared memory.")
      .def_prop_ro("shared_bytes", &PythonGroup::shared_bytes)
      .def_prop_ro("sent_bytes", [](PythonGroup& self) { return self.messenger().sent_bytes(); })
      .def_prop_ro("waited_ns", [](PythonGroup& self) { return self.messenger().waited_ns(); });
  register_membership(type);
  register_calls(type);
}

}  // namespace torchrelay
