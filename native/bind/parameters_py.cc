#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>

#include "register.h"
#include "torchrelay/parameters/node_service.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace torchrelay {
namespace {

using namespace parameters;
using Released = nb::call_guard<nb::gil_scoped_release>;
using Address = std::uintptr_t;

std::chrono::milliseconds milliseconds(double seconds) {
  constexpr double kLongest = 1e9;
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::min(seconds, kLongest) * 1e3));
}

const std::int64_t* keys_at(Address address) { return reinterpret_cast<const std::int64_t*>(address); }
std::byte* bytes_at(Address address) { return reinterpret_cast<std::byte*>(address); }

void check_signals() {
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw Error(Code::kInterrupted, "interrupted");
}

// Keeps a Python object alive; may be dropped by a thread without the GIL.
std::shared_ptr<void> hold(nb::object object) {
  if (object.is_none()) return nullptr;
  return std::shared_ptr<nb::object>(new nb::object(std::move(object)), [](nb::object* held) {
    const nb::gil_scoped_acquire gil;
    delete held;
  });
}

std::map<std::string, std::uint64_t> counters(const Store& store) {
  std::map<std::string, std::uint64_t> result;
  const std::pair<const char*, Stat> names[] = {{"local_pulls", kLocalPulls},
                                                {"remote_pulls", kRemotePulls},
                                                {"local_pushes", kLocalPushes},
                                                {"remote_pushes", kRemotePushes},
                                                {"local_sets", kLocalSets},
                                                {"remote_sets", kRemoteSets},
                                                {"sent_bytes", kSentBytes},
                                                {"received_bytes", kReceivedBytes},
                                                {"sent_messages", kSentMessages},
                                                {"received_messages", kReceivedMessages},
                                                {"relocations", kRelocationsIn},
                                                {"replicas_made", kReplicasMade},
                                                {"refreshes", kRefreshes},
                                                {"forwards", kForwards},
                                                {"parked", kParked},
                                                {"evictions", kEvictions},
                                                {"protocol_errors", kProtocolErrors},
                                                {"duplicates", kDuplicates}};
  for (const auto& [name, stat] : names) result[name] = store.total(stat);
  std::uint64_t rounds = 0, replicas = 0, round_ns = 0, refresh_age_ns = 0;
  for (std::uint32_t c = 0; c < store.header().num_channels; ++c) {
    rounds += store.header().boards[c].rounds;
    replicas += store.header().boards[c].replicas;
    round_ns += store.header().boards[c].round_ns;
    refresh_age_ns += store.header().boards[c].refresh_age_ns;
  }
  result["rounds"] = rounds;
  result["replicas"] = replicas;
  result["round_ns"] = round_ns;
  result["refresh_age_ns"] = refresh_age_ns;
  return result;
}

void register_store(nb::module_& module) {
  nb::class_<Store>(module, "ParameterStore", "A node's part of a parameter table, in shared memory.")
      .def_static(
          "create",
          [](std::vector<std::uint32_t> lengths, std::uint64_t num_keys, std::uint64_t capacity,
             std::uint32_t element, std::uint32_t rule, const std::vector<double>& rule_numbers,
             std::uint32_t init, double init_a, double init_b, std::uint64_t init_seed, std::uint32_t node,
             std::uint32_t num_nodes, std::uint32_t num_channels) {
            StoreSpec spec;
            spec.lengths = std::move(lengths);
            spec.num_keys = num_keys;
            spec.capacity = capacity;
            spec.element = static_cast<Element>(element);
            spec.rule = {static_cast<RuleKind>(rule), rule_numbers.at(0), rule_numbers.at(1),
                         rule_numbers.at(2),          rule_numbers.at(3), rule_numbers.at(4),
                         rule_numbers.at(5)};
            spec.init = {static_cast<InitKind>(init), init_a, init_b, init_seed};
            spec.node = node;
            spec.num_nodes = num_nodes;
            spec.num_channels = num_channels;
            return std::make_shared<Store>(Store::create(spec));
          },
          "lengths"_a, "num_keys"_a, "capacity"_a, "element"_a, "rule"_a, "rule_numbers"_a, "init"_a,
          "init_a"_a, "init_b"_a, "init_seed"_a, "node"_a, "num_nodes"_a, "num_channels"_a, Released())
      .def_static(
          "attach",
          [](const std::string& address, std::uint32_t init, double init_a, double init_b,
             std::uint64_t init_seed) {
            return std::make_shared<Store>(
                Store::attach(address, {static_cast<InitKind>(init), init_a, init_b, init_seed}));
          },
          "address"_a, "init"_a, "init_a"_a, "init_b"_a, "init_seed"_a)
      .def_prop_ro("address", &Store::address)
      .def_prop_ro("node", [](const Store& store) { return store.header().node; })
      .def_prop_ro("num_nodes", [](const Store& store) { return store.header().num_nodes; })
      .def_prop_ro("num_channels", [](const Store& store) { return store.header().num_channels; })
      .def("length_of", &Store::length_of, "key"_a)
      .def("valid", &Store::valid, "key"_a)
      .def(
          "has_heard",
          [](const Store& store, std::uint32_t node) {
            return node < kMaxNodes && store.header().heard[node].load() != 0;
          },
          "node"_a)
      .def(
          "elements",
          [](const Store& store, bool whole_rows, Address keys, std::size_t count) {
            const Op op = whole_rows ? Op::kPullRow : Op::kPull;
            return store.value_bytes(op, keys_at(keys), count) / size_of(store.header().element);
          },
          "whole_rows"_a, "keys"_a, "count"_a)
      .def("owned_keys",
           [](const Store& store) {
             auto* keys = new std::vector<std::int64_t>(store.owned_keys());
             const nb::capsule owner(
                 keys, [](void* p) noexcept { delete static_cast<std::vector<std::int64_t>*>(p); });
             return nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>(keys->data(), {keys->size()}, owner);
           })
      .def(
          "set_learning_rate", [](Store& store, double rate) { store.header().learning_rate.store(rate); },
          "rate"_a)
      .def(
          "set_step", [](Store& store, double step) { store.header().step.store(step); }, "step"_a)
      .def(
          "nearest_local",
          [](const Store& store, Address keys, std::size_t count, std::int64_t low, std::int64_t high,
             const std::vector<std::int64_t>& taken, bool distinct, Address drawable) {
            return store.nearest_local(reinterpret_cast<std::int64_t*>(keys), count, low, high, taken,
                                       distinct, reinterpret_cast<const std::uint8_t*>(drawable));
          },
          "keys"_a, "count"_a, "low"_a, "high"_a, "taken"_a, "distinct"_a, "drawable"_a = Address{0},
          Released())
      .def("check_leader", &Store::check_leader)
      .def("leave_in_need", &Store::leave_in_need)
      .def("lose_worker", &Store::lose_worker, "worker"_a)
      .def("dead_workers", &Store::dead_workers)
      .def("counters", &counters);
}

void register_service(nb::module_& module) {
  nb::class_<NodeService>(module, "NodeService", "The threads that answer other nodes and move keys.")
      .def(
          "__init__",
          [](NodeService* self, std::shared_ptr<Store> store, std::shared_ptr<Network> network,
             std::uint32_t techniques, double max_rounds_per_s, double sync_threshold,
             std::uint32_t hysteresis_rounds, double heartbeat_interval_s, double heartbeat_timeout_s) {
            const ChannelOptions options{static_cast<Techniques>(techniques),
                                         max_rounds_per_s,
                                         sync_threshold,
                                         hysteresis_rounds,
                                         milliseconds(heartbeat_interval_s),
                                         milliseconds(heartbeat_timeout_s)};
            new (self) NodeService(std::move(store), std::move(network), options);
          },
          "store"_a, "network"_a, "techniques"_a, "max_rounds_per_s"_a, "sync_threshold"_a,
          "hysteresis_rounds"_a, "heartbeat_interval_s"_a, "heartbeat_timeout_s"_a)
      .def_prop_ro("addresses", &NodeService::addresses)
      .def("start", &NodeService::start, "addresses"_a, Released())
      .def("stop", &NodeService::stop, Released());
}

void register_worker(nb::module_& module) {
  nb::class_<Worker>(module, "ParameterWorker", "One worker's access to the whole table.")
      .def(
          "__init__",
          [](Worker* self, std::shared_ptr<Store> store, std::uint32_t worker_id,
             std::shared_ptr<Network> network, const ChannelAddresses& addresses, double timeout_s,
             std::size_t max_unfinished) {
            new (self) Worker(std::move(store), worker_id, std::move(network), addresses,
                              {milliseconds(timeout_s), max_unfinished}, check_signals);
          },
          "store"_a, "worker_id"_a, "network"_a.none(), "addresses"_a, "timeout_s"_a, "max_unfinished"_a)
      .def(
          "access",
          [](Worker& worker, std::uint32_t op, Address keys, std::size_t count, Address values,
             std::size_t size_bytes, bool wait, nb::object held) {
            const std::shared_ptr<void> holder = hold(std::move(held));
            const nb::gil_scoped_release released;
            const std::int64_t timestamp = worker.access(static_cast<Op>(op), keys_at(keys), count,
                                                         bytes_at(values), size_bytes, holder);
            if (!wait || timestamp < 0) return timestamp;
            worker.wait(timestamp);
            return std::int64_t{-1};
          },
          "op"_a, "keys"_a, "count"_a, "values"_a, "size_bytes"_a, "wait"_a, "held"_a.none())
      .def(
          "pull_if_local",
          [](Worker& worker, Address keys, std::size_t count, Address values, std::size_t size_bytes) {
            return worker.pull_if_local(keys_at(keys), count, bytes_at(values), size_bytes);
          },
          "keys"_a, "count"_a, "values"_a, "size_bytes"_a, Released())
      .def("wait", &Worker::wait, "timestamp"_a, Released())
      .def("wait_all", &Worker::wait_all, Released())
      .def("is_finished", &Worker::is_finished, "timestamp"_a, Released())
      .def_prop_ro("unfinished", &Worker::unfinished)
      .def(
          "intent",
          [](Worker& worker, Address keys, std::size_t count, std::int64_t start, std::int64_t end) {
            worker.intent(keys_at(keys), count, start, end);
          },
          "keys"_a, "count"_a, "start"_a, "end"_a, Released())
      .def("advance_clock", &Worker::advance_clock)
      .def_prop_ro("clock", &Worker::clock)
      .def("flush_updates", &Worker::flush_updates, Released())
      .def("flush_refreshes", &Worker::flush_refreshes, Released())
      .def("finalize", &Worker::finalize, Released());
}

}  // namespace

void register_parameters(nb::module_& module) {
  register_store(module);
  register_service(module);
  register_worker(module);
}

}  // namespace torchrelay
