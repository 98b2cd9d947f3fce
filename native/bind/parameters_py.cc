#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>

#include "convert.h"
#include "parameters/node_service.h"
#include "register.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace torchrelay {
namespace {

using namespace parameters;
using std::chrono::milliseconds;

std::map<Stat, std::uint64_t> stats(const Store& store) {
  std::map<Stat, std::uint64_t> totals;
  for (std::uint32_t i = 0; i < kNumStats; ++i)
    totals[static_cast<Stat>(i)] = store.total(static_cast<Stat>(i));
  return totals;
}

void register_enums(nb::module_& module) {
  register_enum<parameters::Op>(module, "TableOp", "What a worker does with rows.", parameters::kOpNames);
  register_enum<RuleKind>(module, "RuleKind", "What a push does to a row.", kRuleNames);
  register_enum<InitKind>(module, "InitKind", "The initial value of keys.", kInitNames);
  register_enum<Techniques>(module, "Techniques", "How keys come to the nodes that need them.",
                            kTechniqueNames);
  register_enum<Stat>(module, "TableStat", "What a node counts.", kStatNames);
  module.def(
      "table_dtypes", [] { return std::vector<Dtype>(std::begin(kTableDtypes), std::end(kTableDtypes)); },
      "The element types that a table can have.");
}

void register_options(nb::module_& module) {
  nb::class_<UpdateRule>(module, "UpdateRule", "See parameters.UpdateRule.")
      .def(
          "__init__",
          [](UpdateRule* self, RuleKind kind, double learning_rate, double eps, double beta1, double beta2,
             double weight_decay, double initial_accumulator) {
            new (self) UpdateRule{.kind = kind,
                                  .learning_rate = learning_rate,
                                  .eps = eps,
                                  .beta1 = beta1,
                                  .beta2 = beta2,
                                  .weight_decay = weight_decay,
                                  .initial_accumulator = initial_accumulator};
          },
          nb::kw_only(), "kind"_a, "learning_rate"_a, "eps"_a, "beta1"_a, "beta2"_a, "weight_decay"_a,
          "initial_accumulator"_a);
  nb::class_<KeyInit>(module, "KeyInit", "See parameters.KeyInit.")
      .def(
          "__init__",
          [](KeyInit* self, InitKind kind, double a, double b, std::uint64_t seed) {
            new (self) KeyInit{.kind = kind, .a = a, .b = b, .seed = seed};
          },
          nb::kw_only(), "kind"_a, "a"_a, "b"_a, "seed"_a);
  nb::class_<StoreSpec>(module, "StoreSpec", "What a node's part of a table is made for.")
      .def(
          "__init__",
          [](StoreSpec* self, std::vector<std::uint32_t> lengths, std::uint64_t num_keys,
             std::uint64_t capacity, Dtype dtype, const UpdateRule& rule, const KeyInit& init,
             std::uint32_t node, std::uint32_t num_nodes, std::uint32_t num_channels) {
            new (self) StoreSpec{.lengths = std::move(lengths),
                                 .num_keys = num_keys,
                                 .capacity = capacity,
                                 .dtype = dtype,
                                 .rule = rule,
                                 .init = init,
                                 .node = node,
                                 .num_nodes = num_nodes,
                                 .num_channels = num_channels};
          },
          nb::kw_only(), "lengths"_a, "num_keys"_a, "capacity"_a, "dtype"_a, "rule"_a, "init"_a, "node"_a,
          "num_nodes"_a, "num_channels"_a);
  nb::class_<ChannelOptions>(module, "ChannelOptions", "How a node's channels work.")
      .def(
          "__init__",
          [](ChannelOptions* self, Techniques techniques, double max_rounds_per_s, double sync_threshold,
             std::uint32_t hysteresis_rounds, double heartbeat_interval_s, double heartbeat_timeout_s) {
            new (self) ChannelOptions{.techniques = techniques,
                                      .max_rounds_per_s = max_rounds_per_s,
                                      .sync_threshold = sync_threshold,
                                      .hysteresis_rounds = hysteresis_rounds,
                                      .heartbeat_interval = from_seconds<milliseconds>(heartbeat_interval_s),
                                      .heartbeat_timeout = from_seconds<milliseconds>(heartbeat_timeout_s)};
          },
          nb::kw_only(), "techniques"_a, "max_rounds_per_s"_a, "sync_threshold"_a, "hysteresis_rounds"_a,
          "heartbeat_interval_s"_a, "heartbeat_timeout_s"_a);
}

void register_store(nb::module_& module) {
  nb::class_<Store>(module, "ParameterStore", "A node's part of a parameter table, in shared memory.")
      .def_static("create", &Store::create, "spec"_a, Released())
      .def_static("attach", &Store::attach, "address"_a, "init"_a)
      .def_prop_ro("address", [](const Store& store) { return store.address(); })
      .def(
          "has_heard",
          [](const Store& store, std::uint32_t node) {
            return node < kMaxNodes && store.header().heard[node].load() != 0;
          },
          "node"_a)
      .def(
          "elements",
          [](const Store& store, bool whole_rows, Address keys, std::size_t count) {
            const auto op = whole_rows ? parameters::Op::kPullRow : parameters::Op::kPull;
            return store.value_bytes(op, pointer<std::int64_t>(keys), count) /
                   size_bytes(store.header().dtype);
          },
          "whole_rows"_a, "keys"_a, "count"_a)
      .def("owned_keys",
           [](const Store& store) {
             auto* keys = new std::vector<std::int64_t>(store.index().owned_keys());
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
          "holds",
          [](const Store& store, Address address, std::size_t count) {
            const auto* keys = pointer<const std::int64_t>(address);
            store.value_bytes(parameters::Op::kPull, keys, count);  // checks the range
            return store.index().holds(keys, count);
          },
          "keys"_a, "count"_a, Released())
      .def(
          "nearest_local",
          [](const Store& store, Address keys, std::size_t count, std::int64_t low, std::int64_t high,
             const std::vector<std::int64_t>& taken, bool distinct, Address drawable) {
            return store.index().nearest_local(pointer<std::int64_t>(keys), count, low, high, taken, distinct,
                                               pointer<const std::uint8_t>(drawable));
          },
          "keys"_a, "count"_a, "low"_a, "high"_a, "taken"_a, "distinct"_a, "drawable"_a = Address{0},
          Released())
      .def("check_leader", [](Store& store) { store.membership().check_leader(); })
      .def("abort_membership", [](Store& store) { store.membership().abort_membership(); })
      .def(
          "lose_worker", [](Store& store, std::uint32_t worker) { store.membership().lose_worker(worker); },
          "worker"_a)
      .def(
          "lose_node",
          [](Store& store, std::uint16_t node) {
            store.membership().lose({.how = Loss::kUnreachable, .node = node});
          },
          "node"_a)
      .def("dead_workers", [](Store& store) { return store.membership().dead_workers(); })
      .def("stats", &stats);
}

void register_service(nb::module_& module) {
  nb::class_<NodeService>(module, "NodeService", "The threads that answer other nodes and move keys.")
      .def(nb::init<std::shared_ptr<Store>, std::shared_ptr<Network>, const ChannelOptions&>(), "store"_a,
           "network"_a, "options"_a)
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
             std::size_t max_unfinished, std::size_t max_message_bytes) {
            new (self) Worker(std::move(store), worker_id, std::move(network), addresses,
                              {.timeout = from_seconds<milliseconds>(timeout_s),
                               .max_unfinished = max_unfinished,
                               .max_message_bytes = max_message_bytes},
                              check_signals);
          },
          "store"_a, "worker_id"_a, "network"_a.none(), "addresses"_a, "timeout_s"_a, "max_unfinished"_a,
          "max_message_bytes"_a = WorkerOptions().max_message_bytes)
      .def(
          "access",
          [](Worker& worker, parameters::Op op, Address keys, std::size_t count, Address values,
             std::size_t size_bytes, bool wait, nb::object held) {
            const std::shared_ptr<void> holder = hold(std::move(held));
            const nb::gil_scoped_release released;
            if (!wait)
              return worker.access(op, pointer<std::int64_t>(keys), count, pointer(values), size_bytes,
                                   holder);
            worker.access_and_wait(op, pointer<std::int64_t>(keys), count, pointer(values), size_bytes);
            return std::int64_t{-1};
          },
          "op"_a, "keys"_a, "count"_a, "values"_a, "size_bytes"_a, "wait"_a, "held"_a.none())
      .def(
          "pull_if_local",
          [](Worker& worker, Address keys, std::size_t count, Address values, std::size_t size_bytes) {
            return worker.pull_if_local(pointer<std::int64_t>(keys), count, pointer(values), size_bytes);
          },
          "keys"_a, "count"_a, "values"_a, "size_bytes"_a, Released())
      .def("wait", &Worker::wait, "timestamp"_a, Released())
      .def("wait_all", &Worker::wait_all, Released())
      .def("is_finished", &Worker::is_finished, "timestamp"_a, Released())
      .def_prop_ro("unfinished", &Worker::unfinished)
      .def(
          "intent",
          [](Worker& worker, Address keys, std::size_t count, std::int64_t start, std::int64_t end) {
            worker.intent(pointer<std::int64_t>(keys), count, start, end);
          },
          "keys"_a, "count"_a, "start"_a, "end"_a, Released())
      .def("advance_clock", &Worker::advance_clock)
      .def_prop_ro("clock", &Worker::clock)
      .def("wait_sync", &Worker::wait_sync, Released())
      .def("finalize", &Worker::finalize, Released());
}

}  // namespace

void register_parameters(nb::module_& module) {
  register_enums(module);
  register_options(module);
  register_store(module);
  register_service(module);
  register_worker(module);
}

}  // namespace torchrelay
