#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
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

// One rank's part in a group of several hosts. In a forked child, closing does nothing.
class HostCommunicator {
 public:
  HostCommunicator(MessengerOptions options, Descriptor listener, transport::Hosts hosts, nb::object local,
                   nb::callable on_failure)
      : local_(nb::cast<Communicator*>(local)), held_(hold(std::move(local))) {
    const std::size_t host = hosts.host_of(hosts.rank);
    if (host == hosts.ranks.size()) throw Error(Code::kArgument, "hosts must name each rank");
    here_ = hosts.ranks[host];
    report_ = hold(std::move(on_failure));
    const std::weak_ptr<nb::callable> weak = report_;  // it may hold what holds us
    messenger_ = make_process_owned<Messenger>(
        std::move(options), std::move(listener),
        [this](Block block, int source, std::int64_t tag, std::uint8_t code,
               std::chrono::nanoseconds timeout) {
          return local_->mailboxes().receive(block, index_here(source), tag, code, timeout, true);
        },
        [weak](const Error& error) {
          const auto report = weak.lock();
          if (!report) return;
          const nb::gil_scoped_acquire gil;
          const nb::error_scope raised_before;  // the failure may be that this thread was interrupted
          try {
            (*report)(error);
          } catch (nb::python_error& raised) {
            raised.discard_as_unraisable("torchrelay: reporting a failure");
          }
        });
    group_.emplace(local_->group(), *messenger_, std::move(hosts));
  }

  ~HostCommunicator() {
    const nb::gil_scoped_release released;
    close();
  }

  // Breaks the group, as PeerLostError or OperationTimeoutError on all ranks.
  void report(const std::string& message, const std::vector<int>& names, bool timed_out) {
    if (origin_.is_forked() || closed_.load()) return;
    messenger_->fail({timed_out ? Code::kTimeout : Code::kPeerLost, message, names});
  }

  void close() {
    if (origin_.is_forked() || closed_.exchange(true)) return;
    const int me = group_->name();
    if (local_->busy())
      messenger_->fail(
          {Code::kPeerLost,
           "rank " + std::to_string(me) + " has left the group (destroy_process_group, or its process ended)",
           {me}});
    local_->stop();
    messenger_->close();
    report_.reset();
  }

  template <class Collective>
  Communicator::Pending run(const char* name, double timeout_s, bool block, Collective collective) {
    return local_->run(name, timeout_s, block,
                       [this, collective = std::move(collective)](SharedGroup&, const Operation& operation) {
                         collective(*group_, operation);
                       });
  }

  std::shared_ptr<Transfer> send(torchrelay::Address data, std::size_t size_bytes, int to, std::int64_t tag,
                                 std::uint8_t code, double timeout_s) {
    require_usable("send");
    const Block block{pointer(data), size_bytes};
    const int index = index_here(to);
    if (index < 0) return messenger_->send(block, to, tag, code, seconds(timeout_s));
    const auto local_tag = static_cast<std::int32_t>(local_tags_.fetch_add(1) & 0x7fffffff);
    auto sent = local_->mailboxes().send(block, index, local_tag, code, seconds(timeout_s));
    messenger_->announce({nullptr, size_bytes}, to, tag, code, local_tag);
    return sent;
  }

  std::shared_ptr<Transfer> receive(torchrelay::Address data, std::size_t size_bytes, int source,
                                    std::int64_t tag, std::uint8_t code, double timeout_s) {
    require_usable("recv");
    return messenger_->receive({pointer(data), size_bytes}, source, tag, code, seconds(timeout_s));
  }

  bool wait_transfer(const std::shared_ptr<Transfer>& transfer, double timeout_s) {
    return messenger_->wait(transfer, seconds(timeout_s), check_signals);
  }

  std::uint64_t jobs() const { return local_->jobs(); }
  const transport::HostGroup& group() const { return *group_; }
  Messenger& messenger() { return *messenger_; }

 private:
  int index_here(int rank) const {
    const auto found = std::ranges::find(here_, rank);
    return found == here_.end() ? -1 : static_cast<int>(found - here_.begin());
  }

  void require_usable(const char* operation) const {
    local_->refuse_in_child(operation);
    group_->require_whole();
  }

  Communicator* local_;
  std::shared_ptr<nb::object> held_;
  std::shared_ptr<nb::callable> report_;
  std::vector<int> here_;
  Origin origin_;
  ProcessOwned<Messenger> messenger_;
  std::optional<transport::HostGroup> group_;
  std::atomic<std::uint32_t> local_tags_{0};
  std::atomic<bool> closed_{false};
};

using CoalescedHostCalls = Coalesced<transport::HostGroup>;

// As all_reduce, where others sum between hosts. `Group` has a run() as HostCommunicator.
template <class Group>
Communicator::Pending all_reduce_through(Group& self, torchrelay::Address data, std::size_t count,
                                         Dtype dtype, Op op, std::size_t piece_bytes, nb::callable start,
                                         nb::callable finish, double timeout_s, bool block,
                                         torchrelay::Address source) {
  const auto caller = std::this_thread::get_id();
  transport::NetworkSum network{piece_bytes,
                                [caller, begin = hold(std::move(start))](
                                    std::size_t first, std::size_t elements, std::chrono::nanoseconds left) {
                                  const nb::gil_scoped_acquire gil;
                                  const std::chrono::duration<double> left_s = left;
                                  call(caller, *begin, first, elements, left_s.count());
                                },
                                [caller, end = hold(std::move(finish))] {
                                  const nb::gil_scoped_acquire gil;
                                  const nb::object failure = call(caller, *end);
                                  if (!failure.is_none()) throw Error(nb::cast<const Error&>(failure));
                                }};
  const nb::gil_scoped_release released;
  return self.run("all_reduce", timeout_s, block,
                  [=, network = std::move(network)](transport::HostGroup& group, const Operation& operation) {
                    all_reduce(group, operation, pointer(data), count, dtype, op, pointer(source), network);
                  });
}

template <class Group>
void register_through(nb::class_<Group>& type) {
  type.def(
      "all_reduce_through", &all_reduce_through<Group>, "data"_a, "count"_a, "dtype"_a, "op"_a,
      "piece_bytes"_a, "start"_a, "finish"_a, "timeout_s"_a, "block"_a, "source"_a = 0,
      nb::sig("def all_reduce_through(self, data: int, count: int, dtype: Dtype, op: Op, piece_bytes: int, "
              "start: collections.abc.Callable[[int, int, float], None], finish: "
              "collections.abc.Callable[[], Failure | None], timeout_s: float, block: bool, source: int = "
              "0) -> Ticket | None"),
      "As all_reduce, but others sum between hosts: the leaders call `start(first, count, timeout_s)` "
      "for each piece, and `finish()` to wait for the oldest sum, which divides averages too.");
}

void make_host_communicator(HostCommunicator* self, int rank, std::vector<int> names,
                            const Addresses& addresses, std::vector<std::vector<int>> hosts, int listener,
                            const nb::bytes& token, std::shared_ptr<transport::Tls> tls,
                            std::size_t share_bytes, std::size_t piece_bytes, std::size_t inline_bytes,
                            nb::object local, nb::callable on_failure) {
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
  new (self)
      HostCommunicator(std::move(options), std::move(owned),
                       {rank, std::move(names), std::move(hosts), share_bytes, piece_bytes, inline_bytes},
                       std::move(local), std::move(on_failure));
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

  nb::class_<HostCommunicator> type(module, "HostCommunicator",
                                    "One rank's part in a group of several hosts. Thread-safe.");
  type.def("__init__", &make_host_communicator, "rank"_a, "names"_a, "addresses"_a, "hosts"_a, "listener"_a,
           "token"_a, "tls"_a.none(), "share_bytes"_a, "piece_bytes"_a, "inline_bytes"_a, "local"_a,
           "on_failure"_a,
           nb::sig(
               "def __init__(self, rank: int, names: collections.abc.Sequence[int], addresses: "
               "collections.abc.Sequence[tuple[str, int]], hosts: "
               "collections.abc.Sequence[collections.abc.Sequence[int]], listener: int, token: bytes, "
               "tls: Tls | None, share_bytes: int, piece_bytes: int, inline_bytes: int, local: Communicator, "
               "on_failure: collections.abc.Callable[[Failure], None]) -> None"),
           "`names[r]` is how users know rank r, `addresses[r]` where it listens, `hosts` the ranks of each "
           "host. `listener` is the descriptor of a listening socket, which is owned from now on; `token` "
           "the group's secret, and `tls` encrypts what leaves the host; `local` has the ranks of this host, "
           "and is used by this class alone. "
           "`on_failure` is called once, when the group breaks here or a peer reports that it broke, in any "
           "thread. The sizes, equal on all ranks, are described in host_collectives.h.")
      .def(
          "lost",
          [](HostCommunicator& self, const std::vector<int>& ranks) { return self.messenger().lost(ranks); },
          "ranks"_a, Released(),
          "The failure for the first of `ranks` whose connection ended without a farewell.")
      .def(
          "with_host",
          [](HostCommunicator& self, const Error& failure, int peer) {
            return self.messenger().with_host(failure, peer);
          },
          "failure"_a, "peer"_a, Released(),
          "Names also the ranks of a lost rank's host that cannot be reached either.")
      .def_prop_ro("shared_bytes", [](HostCommunicator& self) { return self.group().shared_bytes(); })
      .def_prop_ro("sent_bytes", [](HostCommunicator& self) { return self.messenger().sent_bytes(); })
      .def_prop_ro("waited_ns", [](HostCommunicator& self) { return self.messenger().waited_ns(); });
  auto calls =
      register_communicator<HostCommunicator, CoalescedHostCalls>(module, type, "CoalescedHostCalls");
  register_through(calls);
  register_through(type);
}

}  // namespace torchrelay
