// The aggregation switch: the UDP switch, the worker, and the protocol's parts for tests.
#include <nanobind/nanobind.h>
#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "convert.h"
#include "register.h"
#include "torchrelay/error.h"
#include "torchrelay/switch/quantizer.h"
#include "torchrelay/switch/udp_switch.h"
#include "torchrelay/switch/worker.h"

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

void register_wire(nb::module_& module) {
  nb::class_<Header>(module, "SwitchHeader", "The header of a packet of SwitchML's UDP protocol.")
      .def(
          "__init__",
          [](Header* self, std::uint8_t job, std::uint32_t tsi, std::uint16_t slot, std::uint8_t set,
             std::int8_t exponent, std::uint16_t numel, std::int8_t second_exponent) {
            if (slot >= kMaxSlots || set > 1 || !is_packet_numel(numel))
              throw Error(Code::kArgument,
                          "switch: a header needs a slot below 8192, set 0 or 1, 64 or 256 values");
            new (self) Header{job, tsi, slot, set, exponent, numel, second_exponent};
          },
          "job"_a, "tsi"_a, "slot"_a, "set"_a, "exponent"_a, "numel"_a, "second_exponent"_a = 0)
      .def_ro("job", &Header::job)
      .def_ro("tsi", &Header::tsi)
      .def_ro("slot", &Header::slot)
      .def_ro("set", &Header::set)
      .def_ro("exponent", &Header::exponent)
      .def_ro("numel", &Header::numel)
      .def_ro("second_exponent", &Header::second_exponent)
      .def(
          "__eq__",
          [](const Header& a, const Header& b) {
            return a.job == b.job && a.tsi == b.tsi && a.slot == b.slot && a.set == b.set &&
                   a.exponent == b.exponent && a.numel == b.numel && a.second_exponent == b.second_exponent;
          },
          nb::is_operator(), nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("serialize",
           [](const Header& header) {
             std::byte out[kHeaderBytes];
             serialize(header, out);
             return to_python(out);
           })
      .def_static(
          "parse", [](const nb::bytes& datagram) { return parse(bytes_of(datagram)); }, "datagram"_a,
          "The header, or None if the datagram is not exactly one data packet.");
  module.attr("SWITCH_UDP_PORT") = static_cast<int>(kUdpPort);
  module.attr("SWITCH_NUM_UDP_PORTS") = static_cast<int>(kNumUdpPorts);
}

void register_table(nb::module_& module) {
  nb::enum_<Verdict>(module, "SwitchVerdict", "What a switch does with a packet.")
      .value("CONSUMED", Verdict::kConsumed)
      .value("MULTICAST", Verdict::kMulticast)
      .value("FORWARD", Verdict::kForward)
      .value("UNICAST", Verdict::kUnicast)
      .value("DUPLICATE", Verdict::kDuplicate)
      .value("STALE", Verdict::kStale)
      .value("REJECTED", Verdict::kRejected);
  nb::class_<TableShape>(module, "SwitchTableShape", "What a session's slots are made for.")
      .def(
          "__init__",
          [](TableShape* self, std::uint32_t num_workers, std::uint16_t num_slots, std::uint16_t numel,
             bool sequenced,
             bool is_leaf) { new (self) TableShape{num_workers, num_slots, numel, sequenced, is_leaf}; },
          "num_workers"_a, "num_slots"_a, "numel"_a, "sequenced"_a, "is_leaf"_a = false)
      .def_ro("num_workers", &TableShape::num_workers)
      .def_ro("num_slots", &TableShape::num_slots)
      .def_ro("numel", &TableShape::numel)
      .def_ro("sequenced", &TableShape::sequenced);
  nb::class_<SlotTable>(module, "SwitchSlotTable", "A session's slots without a network, for tests.")
      .def(nb::init<const TableShape&>(), "shape"_a)
      .def(
          "apply",
          [](SlotTable& table, const nb::bytes& datagram, std::uint32_t rank) {
            const auto header = parse(bytes_of(datagram));
            if (!header || rank >= table.shape().num_workers) return Verdict::kRejected;
            return table.apply(*header, bytes_of(datagram).data() + kHeaderBytes, rank, 0);
          },
          "datagram"_a, "rank"_a)
      .def(
          "accept",
          [](SlotTable& table, const nb::bytes& datagram) {
            const auto header = parse(bytes_of(datagram));
            return header && table.accept(*header, bytes_of(datagram).data() + kHeaderBytes);
          },
          "datagram"_a, "Take a result of the switch above; whether every worker gets it now.")
      .def(
          "result",
          [](const SlotTable& table, const nb::bytes& datagram) {
            const auto header = parse(bytes_of(datagram));
            if (!header || header->slot >= table.shape().num_slots || header->numel != table.shape().numel)
              throw Error(Code::kArgument, "switch: the datagram is not a packet of this table");
            std::vector<std::byte> out(packet_bytes(header->numel));
            table.result(*header, out.data());
            return to_python(out);
          },
          "datagram"_a, "The packet that answers one whose verdict was MULTICAST or UNICAST.")
      .def("missing", &SlotTable::missing, "The workers that packets in progress wait for.");
}

// A stream with its queue, for tests that are its network and its clock.
class PythonStream {
 public:
  explicit PythonStream(const StreamShape& shape) : stream_(shape), queue_(packet_bytes(shape.numel)) {}

  std::vector<nb::bytes> begin(Address values, std::size_t count, Dtype dtype, std::uint8_t job,
                               double now_s) {
    if (dtype == Dtype::kFloat32) {
      stream_.begin(pointer<float>(values), count, job, queue_, microseconds(now_s));
    } else if (dtype == Dtype::kInt32) {
      stream_.begin(pointer<std::int32_t>(values), count, job, queue_, microseconds(now_s));
    } else {
      throw Error(Code::kArgument, "switch: a stream sums int32 and float32");
    }
    return take();
  }

  std::vector<nb::bytes> receive(const nb::bytes& datagram, double now_s) {
    stream_.receive(bytes_of(datagram), queue_, microseconds(now_s));
    return take();
  }

  std::vector<nb::bytes> tick(double now_s) {
    stream_.tick(queue_, microseconds(now_s));
    return take();
  }

  double next_deadline() const { return static_cast<double>(stream_.next_deadline().count()) / 1e6; }
  const Stream& stream() const { return stream_; }

 private:
  std::vector<nb::bytes> take() {
    std::vector<nb::bytes> packets;
    for (std::size_t i = 0; i < queue_.size(); ++i)
      packets.push_back(to_python(queue_.bytes().subspan(i * queue_.packet_bytes(), queue_.packet_bytes())));
    queue_.clear();
    return packets;
  }

  Stream stream_;
  PacketQueue queue_;
};

void register_stream(nb::module_& module) {
  nb::class_<StreamStats>(module, "SwitchStreamStats", "Packets of a worker.")
      .def_ro("sent", &StreamStats::sent, "Retransmissions included.")
      .def_ro("results", &StreamStats::results)
      .def_ro("retransmissions", &StreamStats::retransmissions)
      .def_ro("discarded", &StreamStats::discarded, "Answers to no packet in flight.");
  nb::class_<RetryPolicy>(module, "SwitchRetryPolicy", "When packets are sent again.")
      .def(
          "__init__",
          [](RetryPolicy* self, double timeout_s, std::uint32_t threshold, std::uint32_t increment) {
            new (self) RetryPolicy{microseconds(timeout_s), threshold, increment};
          },
          "timeout_s"_a = 0.01, "threshold"_a = 100, "increment"_a = 100);
  nb::class_<PythonStream>(module, "SwitchStream", "A worker thread's part without a network, for tests.")
      .def(
          "__init__",
          [](PythonStream* self, std::uint16_t first_slot, std::uint16_t window, std::uint16_t numel,
             std::uint32_t num_workers, const RetryPolicy& retry) {
            new (self) PythonStream({first_slot, window, numel, num_workers, retry});
          },
          "first_slot"_a, "window"_a, "numel"_a, "num_workers"_a, "retry"_a)
      .def("begin", &PythonStream::begin, "values"_a, "count"_a, "dtype"_a, "job"_a, "now_s"_a)
      .def("receive", &PythonStream::receive, "datagram"_a, "now_s"_a)
      .def("tick", &PythonStream::tick, "now_s"_a)
      .def_prop_ro("done", [](const PythonStream& self) { return self.stream().done(); })
      .def_prop_ro("next_deadline_s", &PythonStream::next_deadline)
      .def_prop_ro("exact_chunks", [](const PythonStream& self) { return self.stream().exact_chunks(); })
      .def_prop_ro("stats", [](const PythonStream& self) { return self.stream().stats(); });
  module.def("switch_scale", &quantization_scale, "exponent"_a, "num_workers"_a,
             "What float32 values are multiplied with before they are rounded to int32.");
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
  register_wire(module);
  register_table(module);
  register_stream(module);
  register_counts(module);
  register_udp_switch(module);
  register_worker(module);
}

}  // namespace torchrelay
