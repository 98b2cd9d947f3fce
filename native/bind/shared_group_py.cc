#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "communicator.h"
#include "register.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace torchrelay {
namespace {

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
          "function"_a, nb::sig("def when_done(self, function: collections.abc.Callable[[], None]) -> None"));
  nb::class_<Transfer>(module, "Transfer", "A send or receive in progress.")
      .def_prop_ro("ticket", &Transfer::ticket, nb::rv_policy::reference_internal)
      .def_prop_ro("source", &Transfer::source)
      .def_prop_ro("tag", &Transfer::tag)
      .def_prop_ro("size_bytes", &Transfer::size_bytes);
}

void register_reduce(nb::module_& module) {
  nb::enum_<Dtype> dtypes(module, "Dtype", "Element types that are computed with, under torch's names.");
  for (int i = 0; i < kNumDtypes; ++i) dtypes.value(kDtypeInfos[i].name, static_cast<Dtype>(i));
  register_enum<Op>(module, "Op", "Reductions, under c10d's names.", kOpNames);
}

}  // namespace

void register_shared_group(nb::module_& module) {
  register_ticket(module);
  register_reduce(module);
  nb::class_<Communicator> type(module, "Communicator", "One rank's part in a group of ranks of one host.");
  type.def_static(
          "create_segment",
          [](int size, std::size_t slot_bytes, std::size_t one_shot_bytes, std::size_t mailbox_bytes) {
            return SharedGroup::create({size, slot_bytes, one_shot_bytes, mailbox_bytes});
          },
          "size"_a, "slot_bytes"_a, "one_shot_bytes"_a, "mailbox_bytes"_a)
      .def(nb::init<SharedMemory&, int, std::vector<int>, double, double>(), "memory"_a, "rank"_a, "names"_a,
           "spin_s"_a, "yield_s"_a)
      .def("join", &Communicator::join, "timeout_s"_a, Released())
      .def("check", &Communicator::check, "operation"_a, Released(),
           "Raises if the group has failed or one of its ranks has died.")
      .def_prop_ro("waiting_ns", [](Communicator& self) { return self.group().waiting_ns(); });
  register_communicator<Communicator, Coalesced<SharedGroup>>(module, type, "CoalescedCalls");
}

}  // namespace torchrelay
