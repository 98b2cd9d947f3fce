#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>

#include "convert.h"
#include "core/error.h"
#include "core/origin.h"
#include "net/delayed_network.h"
#include "net/endpoint.h"
#include "net/memory_network.h"
#include "net/tcp_network.h"
#include "net/tls.h"
#include "register.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace torchrelay {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr microseconds kBetweenSignalChecks{50000};

// What was received: bytes of a Message, in the form of Python's buffer protocol.
struct ReceivedBytes {
  Message message;
};

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const Message& message = nb::inst_ptr<ReceivedBytes>(self)->message;
  return PyBuffer_FillInfo(view, self, message.data(), static_cast<Py_ssize_t>(message.size_bytes()), 1,
                           flags);
}

PyType_Slot received_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

// An endpoint for Python, where two threads may call at once: they take turns.
class PythonEndpoint {
 public:
  explicit PythonEndpoint(std::unique_ptr<Endpoint> endpoint) : endpoint_(endpoint.release()) {}

  std::string address() const { return endpoint_->address(); }

  void connect(std::uint32_t peer, const std::string& address) {
    const nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    endpoint_->connect(peer, address);
  }

  void disconnect(std::uint32_t peer) {
    const nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    endpoint_->disconnect(peer);
  }

  // `contents` follow `data`; a buffer of Python.
  void send(std::uint32_t peer, const nb::bytes& data, nb::handle contents) {
    const View view(contents);
    Message message = Message::allocate(data.size() + view.size());
    if (data.size() != 0) std::memcpy(message.data(), data.c_str(), data.size());
    if (view.size() != 0) std::memcpy(message.data() + data.size(), view.data(), view.size());
    const nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    endpoint_->send(peer, std::move(message));
  }

  bool has_unsent(std::uint32_t peer) {
    const nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    return endpoint_->has_unsent(peer);
  }

  nb::object receive(double timeout_s) {
    const auto deadline = std::chrono::steady_clock::now() + from_seconds<microseconds>(timeout_s);
    for (;;) {
      const auto left = std::chrono::duration_cast<microseconds>(deadline - std::chrono::steady_clock::now());
      Message message;
      if (receive_for(message, std::clamp(left, microseconds(0), kBetweenSignalChecks)))
        return nb::steal(PyMemoryView_FromObject(nb::cast(ReceivedBytes{std::move(message)}).ptr()));
      if (left <= kBetweenSignalChecks) return nb::none();
      check_signals();
    }
  }

 private:
  bool receive_for(Message& message, microseconds timeout) {
    const nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    return endpoint_->receive(message, timeout);
  }

  std::mutex mutex_;
  ProcessOwned<Endpoint> endpoint_;
};

SessionToken token_of(const nb::bytes& token) {
  SessionToken result;
  if (token.size() != result.size())
    throw Error(Code::kArgument, "a session token has " + std::to_string(result.size()) + " bytes, not " +
                                     std::to_string(token.size()));
  std::memcpy(result.data(), token.c_str(), result.size());
  return result;
}

void make_tcp_network(TcpNetwork* self, const nb::bytes& token, std::shared_ptr<net::Tls> tls,
                      const std::string& interface, std::size_t max_message_bytes, bool local_sockets,
                      double peer_timeout_s, double linger_s) {
  NetworkOptions options;
  options.token = token_of(token);
  options.tls = std::move(tls);
  options.interface = interface;
  options.max_message_bytes = max_message_bytes;
  options.local_sockets = local_sockets;
  options.peer_timeout = from_seconds<milliseconds>(peer_timeout_s);
  options.linger = from_seconds<milliseconds>(linger_s);
  new (self) TcpNetwork(std::move(options));
}

void make_tls(net::Tls* self, const std::string& library_path, const nb::bytes& key) {
  net::Key bytes;
  if (key.size() != bytes.size())
    throw Error(Code::kArgument,
                "a key has " + std::to_string(bytes.size()) + " bytes, not " + std::to_string(key.size()));
  std::memcpy(bytes.data(), key.c_str(), bytes.size());
  new (self) net::Tls(library_path, bytes);
}

}  // namespace

void register_endpoint(nb::module_& module) {
  nb::class_<ReceivedBytes>(module, "_ReceivedBytes", nb::type_slots(received_slots));

  nb::class_<PythonEndpoint>(module, "Endpoint", "Sends and receives messages; threads take turns.")
      .def_prop_ro("address", &PythonEndpoint::address)
      .def("connect", &PythonEndpoint::connect, "peer"_a, "address"_a)
      .def("disconnect", &PythonEndpoint::disconnect, "peer"_a)
      .def("send", &PythonEndpoint::send, "peer"_a, "data"_a, "contents"_a = nb::bytes("", 0),
           nb::sig("def send(self, peer: int, data: bytes, contents: bytes | memoryview = b'') -> None"),
           "Sends `data`, and then `contents`, in one message.")
      .def("has_unsent", &PythonEndpoint::has_unsent, "peer"_a,
           "Return whether messages wait until `peer`, which has not ended, reads earlier ones.")
      .def("receive", &PythonEndpoint::receive, "timeout_s"_a,
           nb::sig("def receive(self, timeout_s: float) -> memoryview | None"));

  nb::class_<Network>(module, "Network", "Opens endpoints.")
      .def(
          "open",
          [](Network& self, const std::string& label) {
            return std::make_shared<PythonEndpoint>(self.open(label));
          },
          "label"_a, Released());

  nb::class_<MemoryNetwork, Network>(module, "MemoryNetwork", "Endpoints of one process.")
      .def(nb::init<>())
      .def("cut", &MemoryNetwork::cut, "label"_a, Released());

  nb::class_<DelayedNetwork, Network>(module, "DelayedNetwork",
                                      "Another network, whose messages it delays, reorders and duplicates.")
      .def(
          "__init__",
          [](DelayedNetwork* self, std::shared_ptr<Network> network, double max_delay_s,
             double duplicate_probability, std::uint64_t seed) {
            new (self) DelayedNetwork(std::move(network),
                                      {from_seconds<microseconds>(max_delay_s), duplicate_probability, seed});
          },
          "network"_a, "max_delay_s"_a = 0.0, "duplicate_probability"_a = 0.0, "seed"_a = 0);

  nb::class_<net::Tls>(module, "Tls", "Encrypts connections with a key, by the libssl at a path.")
      .def("__init__", &make_tls, "library_path"_a, "key"_a);

  nb::class_<TcpNetwork, Network>(module, "TcpNetwork", "Endpoints over sockets; see transport.network.")
      .def("__init__", &make_tcp_network, nb::kw_only(), "token"_a, "tls"_a.none() = nb::none(),
           "interface"_a = "127.0.0.1", "max_message_bytes"_a = NetworkOptions().max_message_bytes,
           "local_sockets"_a = true, "peer_timeout_s"_a = 10.0, "linger_s"_a = 1.0)
      .def_prop_ro("ignored_connections", &TcpNetwork::ignored_connections);
}

}  // namespace torchrelay
