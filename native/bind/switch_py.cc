// The aggregation switch: the UDP switch and the worker.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "convert.h"
#include "core/error.h"
#include "register.h"
#include "switch/udp_switch.h"
#include "switch/worker.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace torchrelay {
namespace {

using namespace switchml;

#define TORCHRELAY_SWITCH_STAT_TEXT(enumerator, name, meaning) {name, meaning},
constexpr struct {
  const char* name;
  const char* meaning;
} kStatTexts[] = {TORCHRELAY_SWITCH_STATS(TORCHRELAY_SWITCH_STAT_TEXT)};

Microseconds microseconds(double seconds) { return from_seconds<Microseconds>(seconds); }

Bytes bytes_of(const nb::bytes& data) {
  return {static_cast<const std::byte*>(static_cast<const void*>(data.c_str())), data.size()};
}

nb::bytes to_python(Bytes data) { return nb::bytes(data.data(), data.size()); }

void register_protocol(nb::module_& module) {
  module.attr("SWITCH_UDP_PORT") = static_cast<int>(kUdpPort);
  module.attr("SWITCH_NUM_UDP_PORTS") = static_cast<int>(kNumUdpPorts);
  module.attr("SWITCH_MAX_NUMEL") = static_cast<int>(kMaxNumel);
  module.attr("SWITCH_CONTROL_TYPE") = static_cast<int>(kControlType);
  module.attr("SWITCH_XDP_MAX_WORKERS") = static_cast<int>(kXdpMaxWorkers);
  module.attr("SWITCH_XDP_MAX_PORTS") = static_cast<int>(kXdpMaxPorts);
#define TORCHRELAY_SWITCH_KIND(enumerator, name, kind) .value(#name, enumerator)
  nb::enum_<ControlKind>(module, "SwitchControlKind", nb::is_arithmetic(), "Kinds of control messages.")
      TORCHRELAY_SWITCH_CONTROL_KINDS(TORCHRELAY_SWITCH_KIND);
}

void register_sessions(nb::module_& module) {
  nb::class_<TableShape>(module, "SwitchTableShape", "What a session's slots are made for.")
      .def(nb::init<std::uint32_t, std::uint16_t, std::uint16_t, bool>(), "num_workers"_a, "num_slots"_a,
           "numel"_a, "sequenced"_a)
      .def_ro("num_workers", &TableShape::num_workers)
      .def_ro("num_slots", &TableShape::num_slots)
      .def_ro("numel", &TableShape::numel)
      .def_ro("sequenced", &TableShape::sequenced);
}

// The first `count` stats, by name.
nb::dict counts_of(const SwitchCounts& counts, std::size_t count) {
  nb::dict by_name;
  for (std::size_t stat = 0; stat < count; ++stat) by_name[kStatTexts[stat].name] = counts[stat];
  return by_name;
}

void register_counts(nb::module_& module) {
  module.def(
      "switch_stats",
      [] {
        nb::dict meanings;
        for (const auto& [name, meaning] : kStatTexts) meanings[name] = meaning;
        return meanings;
      },
      nb::sig("def switch_stats() -> dict[str, str]"),
      "What a switch counts, with the meanings; SWITCH_NUM_SESSION_STATS of them for each session too.");
  module.attr("SWITCH_NUM_SESSION_STATS") = static_cast<int>(kNumSessionStats);
  nb::class_<WorkerCounts>(module, "SwitchWorkerCounts", "Packets of one worker of a session.")
      .def_ro("rank", &WorkerCounts::rank)
      .def_ro("received", &WorkerCounts::received)
      .def_ro("retransmissions", &WorkerCounts::retransmissions)
      .def_ro("silent_s", &WorkerCounts::silent_s);
  nb::class_<SessionInfo>(module, "SwitchSessionInfo", "One session of a switch.")
      .def_ro("id", &SessionInfo::id)
      .def_ro("shape", &SessionInfo::shape)
      .def_prop_ro(
          "counts", [](const SessionInfo& self) { return counts_of(self.counts, kNumSessionStats); },
          nb::sig("def counts(self) -> dict[str, int]"))
      .def_ro("workers", &SessionInfo::workers);
}

void register_udp_switch(nb::module_& module) {
  nb::class_<UdpSwitch>(module, "UdpSwitch",
                        "An aggregation switch on a UDP socket, with a thread of its own.")
      .def(
          "__init__",
          [](UdpSwitch* self, const std::string& address, std::uint16_t port, double drop_ingress,
             double drop_egress, std::uint64_t drop_seed) {
            new (self) UdpSwitch({address, port, drop_ingress, drop_egress, drop_seed});
          },
          "address"_a, "port"_a, "drop_ingress"_a = 0.0, "drop_egress"_a = 0.0, "drop_seed"_a = 0)
      .def_prop_ro("port", &UdpSwitch::port)
      .def("open_session", &UdpSwitch::open_session, "id"_a, "shape"_a, "uplink"_a = -1, Released())
      .def("close_session", &UdpSwitch::close_session, "id"_a, Released())
      .def(
          "add_worker",
          [](UdpSwitch& self, std::uint64_t id, std::uint32_t rank, std::uint32_t ip,
             std::uint16_t first_port,
             std::uint16_t num_ports) { self.add_worker(id, rank, {ip, first_port}, num_ports); },
          "id"_a, "rank"_a, "ip"_a, "first_port"_a, "num_ports"_a, Released())
      .def(
          "receive_control",
          [](UdpSwitch& self, double timeout_s) -> nb::object {
            std::optional<ControlMessage> message;
            {
              const nb::gil_scoped_release released;
              message = self.receive_control(from_seconds<std::chrono::milliseconds>(timeout_s));
            }
            if (!message) return nb::none();
            return nb::make_tuple(to_python(message->bytes), message->from.ip, message->from.port,
                                  message->switch_port);
          },
          "timeout_s"_a,
          nb::sig("def receive_control(self, timeout_s: float) -> tuple[bytes, int, int, int] | None"),
          "The next control message, its sender's address and port, and the switch's port; no bytes: a "
          "stranger's data packet.")
      .def(
          "send_control",
          [](UdpSwitch& self, const nb::bytes& message, std::uint32_t ip, std::uint16_t port,
             std::uint16_t switch_port) { self.send_control(bytes_of(message), {ip, port}, switch_port); },
          "message"_a, "ip"_a, "port"_a, "switch_port"_a)
      .def(
          "stats", [](const UdpSwitch& self) { return counts_of(self.stats(), kNumSwitchStats); },
          nb::sig("def stats(self) -> dict[str, int]"))
      .def("sessions", &UdpSwitch::sessions, Released())
      .def("missing", &UdpSwitch::missing, "id"_a, Released())
      .def("stop", &UdpSwitch::stop, Released());
}

void register_worker(nb::module_& module) {
  nb::class_<StreamStats>(module, "SwitchStreamStats", "Packets of a worker.")
      .def_ro("sent", &StreamStats::sent, "Retransmissions included.")
      .def_ro("results", &StreamStats::results)
      .def_ro("retransmissions", &StreamStats::retransmissions);
  nb::class_<RetryPolicy>(module, "SwitchRetryPolicy", "When packets are sent again.")
      .def(
          "__init__",
          [](RetryPolicy* self, double timeout_s, std::uint32_t threshold, std::uint32_t increment) {
            new (self) RetryPolicy{microseconds(timeout_s), threshold, increment};
          },
          "timeout_s"_a = 0.01, "threshold"_a = 100, "increment"_a = 100);
  nb::class_<WorkerStats>(module, "SwitchWorkerStats", "What a worker has done.")
      .def_ro("jobs", &WorkerStats::jobs)
      .def_ro("payload_bytes", &WorkerStats::payload_bytes)
      .def_ro("exact_chunks", &WorkerStats::exact_chunks)
      .def_ro("busy_s", &WorkerStats::busy_s)
      .def_ro("packets", &WorkerStats::packets);
  nb::class_<Worker>(module, "SwitchWorker", "Sums arrays over the workers of a session, through a switch.")
      .def(
          "__init__",
          [](Worker* self, const std::vector<int>& sockets, const std::string& switch_name,
             std::uint32_t rank, std::uint32_t num_workers, std::uint16_t numel,
             std::uint16_t max_outstanding, const RetryPolicy& retry) {
            new (self) Worker({switch_name, rank, num_workers, numel, max_outstanding, retry, true}, sockets);
          },
          "sockets"_a, "switch_name"_a, "rank"_a, "num_workers"_a, "numel"_a, "max_outstanding"_a, "retry"_a)
      .def(
          "all_reduce",
          [](Worker& self, Address values, std::size_t count, Dtype dtype, double timeout_s) {
            self.all_reduce(pointer(values), count, dtype, microseconds(timeout_s), check_signals);
          },
          "values"_a, "count"_a, "dtype"_a, "timeout_s"_a, Released())
      .def("stats", &Worker::stats, Released())
      .def("close", &Worker::close, Released());
}

}  // namespace

void register_switch(nb::module_& module) {
  register_protocol(module);
  register_sessions(module);
  register_counts(module);
  register_udp_switch(module);
  register_worker(module);
}

}  // namespace torchrelay
