#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "communicator.h"
#include "register.h"
#include "torchrelay/transport/host_collectives.h"
#include "torchrelay/transport/messenger.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace torchrelay {
namespace {

using transport::Address;
using transport::Messenger;
using transport::MessengerOptions;
using Addresses = std::vector<std::pair<std::string, std::uint16_t>>;
using Transfers = std::vector<std::shared_ptr<Transfer>>;

constexpr std::chrono::hours kForever{24 * 365};

// A messenger whose rank shares a host with those of a communicator. In a forked child, closing does nothing.
class PythonMessenger {
 public:
  PythonMessenger(MessengerOptions options, Descriptor listener, nb::object local, nb::callable on_failure)
      : hosts_{options.rank, options.hosts, 0},
        local_(nb::cast<Communicator*>(local)),
        held_(hold(std::move(local))) {
    const auto& hosts = options.hosts;
    const auto host = std::ranges::find_if(
        hosts, [&](const auto& ranks) { return std::ranges::find(ranks, options.rank) != ranks.end(); });
    if (host == hosts.end()) throw Error(Code::kArgument, "hosts must name each rank");
    const std::vector<int> here = *host;
    report_ = hold(std::move(on_failure));
    const std::weak_ptr<nb::callable> weak = report_;  // it may hold what holds us
    messenger_ = make_process_owned<Messenger>(
        std::move(options), std::move(listener),
        [this, here](Block block, int source, std::int32_t tag, std::uint8_t code) {
          const auto index = static_cast<int>(std::ranges::find(here, source) - here.begin());
          return local_->mailboxes().receive(block, index, tag, code, kForever);
        },
        [weak](const Error& error) {
          const auto report = weak.lock();
          if (!report) return;
          const nb::gil_scoped_acquire gil;
          try {
            (*report)(error);
          } catch (nb::python_error& raised) {
            raised.discard_as_unraisable("torchrelay: reporting a failure");
          }
        });
  }

  ~PythonMessenger() {
    const nb::gil_scoped_release released;
    close();
  }

  void close() {
    if (origin_.is_forked()) return;
    messenger_->close();
    report_.reset();
  }

  Messenger& get() { return *messenger_; }

  // Waits for all of them; checks the ranks of this host meanwhile.
  void complete(const Transfers& transfers, const std::string& operation, double deadline_s) {
    const auto deadline = Messenger::Clock::time_point(from_seconds<std::chrono::nanoseconds>(deadline_s));
    const auto poll = [this] {
      check_signals();
      local_->check("waiting for other hosts");
    };
    for (const auto& transfer : transfers) messenger_->complete(transfer, operation.c_str(), deadline, poll);
  }

  // Called when no other collective of the group, or of its ranks of this host, is in progress.
  void all_reduce(torchrelay::Address data, std::size_t count, Dtype dtype, Op op, std::size_t share_bytes,
                  double timeout_s) {
    transport::Hosts hosts = hosts_;
    hosts.share_bytes = share_bytes;
    local_->run("all_reduce", timeout_s, true, [&](SharedGroup& group, const Operation& operation) {
      transport::all_reduce(group, *messenger_, hosts, operation, pointer(data), count, dtype, op);
    });
  }

 private:
  const transport::Hosts hosts_;
  Communicator* local_;
  std::shared_ptr<nb::object> held_;
  std::shared_ptr<nb::callable> report_;
  Origin origin_;
  ProcessOwned<Messenger> messenger_;
};

void make_messenger(PythonMessenger* self, int rank, std::vector<int> names, const Addresses& addresses,
                    std::vector<std::vector<int>> hosts, int listener, const nb::bytes& token,
                    nb::object local, nb::callable on_failure) {
  Descriptor owned(listener);
  MessengerOptions options;
  if (token.size() != options.token.size())
    throw Error(Code::kArgument, "a token has " + std::to_string(options.token.size()) + " bytes, not " +
                                     std::to_string(token.size()));
  std::memcpy(options.token.data(), token.c_str(), token.size());
  options.rank = rank;
  options.names = std::move(names);
  options.hosts = std::move(hosts);
  for (const auto& [host, port] : addresses) options.addresses.push_back({host, port});
  new (self) PythonMessenger(std::move(options), std::move(owned), std::move(local), std::move(on_failure));
}

Error make_failure(const std::string& message, std::vector<int> ranks, bool timed_out) {
  return {timed_out ? Code::kTimeout : Code::kPeerLost, message, std::move(ranks)};
}

}  // namespace

void register_transport(nb::module_& module) {
  nb::class_<Error>(module, "Failure", "Why a group cannot be used any more.")
      .def(
          "__init__",
          [](Error* self, const std::string& message, std::vector<int> ranks, bool timed_out) {
            new (self) Error(make_failure(message, std::move(ranks), timed_out));
          },
          "message"_a, "ranks"_a, "timed_out"_a)
      .def_prop_ro("message", [](const Error& self) { return std::string(self.what()); })
      .def_prop_ro("ranks", [](const Error& self) { return self.ranks(); })
      .def_prop_ro("timed_out", [](const Error& self) { return self.code() == Code::kTimeout; });

  nb::class_<PythonMessenger>(module, "Messenger",
                              "One rank's messages with ranks of other hosts, over TCP. Thread-safe.")
      .def("__init__", &make_messenger, "rank"_a, "names"_a, "addresses"_a, "hosts"_a, "listener"_a,
           "token"_a, "local"_a, "on_failure"_a,
           nb::sig("def __init__(self, rank: int, names: collections.abc.Sequence[int], addresses: "
                   "collections.abc.Sequence[tuple[str, int]], hosts: "
                   "collections.abc.Sequence[collections.abc.Sequence[int]], listener: int, token: bytes, "
                   "local: Communicator, on_failure: collections.abc.Callable[[Failure], None]) -> None"),
           "`names[r]` is how users know rank r, `addresses[r]` where it listens, `hosts` the ranks of each "
           "host. `listener` is the descriptor of a listening socket, which is owned from now on; `token` "
           "the group's secret; `local` has the ranks of this host. `on_failure` is called once, when the "
           "group breaks here or a peer reports that it broke, in any thread.")
      .def(
          "send",
          [](PythonMessenger& self, torchrelay::Address data, std::size_t size_bytes, int to,
             std::int32_t tag, std::uint8_t code, double timeout_s) {
            return self.get().send({pointer(data), size_bytes}, to, tag, code, seconds(timeout_s));
          },
          "data"_a, "size_bytes"_a, "to"_a, "tag"_a, "code"_a, "timeout_s"_a, Released())
      .def(
          "receive",
          [](PythonMessenger& self, torchrelay::Address data, std::size_t size_bytes, int source,
             std::int32_t tag, std::uint8_t code, double timeout_s) {
            return self.get().receive({pointer(data), size_bytes}, source, tag, code, seconds(timeout_s));
          },
          "data"_a, "size_bytes"_a, "source"_a, "tag"_a, "code"_a, "timeout_s"_a, Released(),
          "Receives from `source`; from any rank if it is -1.")
      .def(
          "announce",
          [](PythonMessenger& self, std::size_t size_bytes, int to, std::int32_t tag, std::uint8_t code,
             std::int32_t local_tag) {
            self.get().announce({nullptr, size_bytes}, to, tag, code, local_tag);
          },
          "size_bytes"_a, "to"_a, "tag"_a, "code"_a, "local_tag"_a, Released(),
          "Announces a message to a rank of this host, whose bytes are sent in shared memory.")
      .def(
          "wait",
          [](PythonMessenger& self, const std::shared_ptr<Transfer>& transfer, double timeout_s) {
            return self.get().wait(transfer, seconds(timeout_s), check_signals);
          },
          "transfer"_a, "timeout_s"_a, Released(),
          "Waits for a send or receive, which fails after its own timeout; False: not done yet.")
      .def("complete", &PythonMessenger::complete, "transfers"_a, "operation"_a, "deadline_s"_a, Released(),
           "Waits for the transfers of a collective until `deadline_s` of the monotonic clock, while no rank "
           "of this host is lost.")
      .def("all_reduce", &PythonMessenger::all_reduce, "data"_a, "count"_a, "dtype"_a, "op"_a,
           "share_bytes"_a, "timeout_s"_a, Released(),
           "Replaces the data by their reduction over all ranks, which have agreed on the call; an average "
           "is not divided. `share_bytes`, of a rank's share of a block, is equal on all ranks.")
      .def(
          "lost", [](PythonMessenger& self, const std::vector<int>& ranks) { return self.get().lost(ranks); },
          "ranks"_a, Released(),
          "The failure for the first of `ranks` whose connection ended without a farewell.")
      .def(
          "with_host",
          [](PythonMessenger& self, const Error& failure, int peer) {
            return self.get().with_host(failure, peer);
          },
          "failure"_a, "peer"_a, Released(),
          "Names also the ranks of a lost rank's host that cannot be reached either.")
      .def(
          "fail", [](PythonMessenger& self, const Error& failure) { return self.get().fail(failure); },
          "failure"_a, Released(), "Breaks the group on all ranks; returns the first failure.")
      .def_prop_ro("failure", [](PythonMessenger& self) { return self.get().failure(); })
      .def("close", &PythonMessenger::close, Released())
      .def_prop_ro("sent_bytes", [](PythonMessenger& self) { return self.get().sent_bytes(); })
      .def_prop_ro("received_bytes", [](PythonMessenger& self) { return self.get().received_bytes(); })
      .def_prop_ro("waited_ns", [](PythonMessenger& self) { return self.get().waited_ns(); });
}

}  // namespace torchrelay
