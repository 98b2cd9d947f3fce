// The Python module torchrelay._native. One register_<concept>() per concept; errors are translated here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "convert.h"
#include "core/error.h"
#include "register.h"

namespace nb = nanobind;

namespace {

using torchrelay::Code;

const char* python_error(Code code) {
  switch (code) {
    case Code::kArgument: return "ArgumentError";
    case Code::kSegment: return "SegmentError";
    case Code::kUnavailable: return "UnavailableError";
    case Code::kMismatch: return "MismatchError";
    case Code::kTimeout: return "OperationTimeoutError";
    case Code::kPeerLost: return "PeerLostError";
    case Code::kProtocol: return "ProtocolError";
    case Code::kInterrupted: return nullptr;  // Python's own signal error is already set
  }
  return "TorchRelayError";
}

void raise_in_python(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const torchrelay::Error& error) {
    const char* name = python_error(error.code());
    if (name == nullptr) return;
    nb::object type = nb::module_::import_("torchrelay.errors").attr(name);
    // It may quote what a peer sent.
    const auto text = nb::steal(PyUnicode_DecodeUTF8(
        error.what(), static_cast<Py_ssize_t>(std::strlen(error.what())), "backslashreplace"));
    nb::object value = error.ranks().empty() ? type(text) : type(text, error.ranks());
    PyErr_SetObject(type.ptr(), value.ptr());
  }
}

}  // namespace

void torchrelay::check_signals() {
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw Error(Code::kInterrupted, "interrupted");
}

NB_MODULE(_native, module) {
  module.doc() = "The native core: memory, reductions and messages. Knows neither torch nor the components.";
  nb::set_leak_warnings(false);  // an autograd graph in a global variable outlives the interpreter's objects
  nb::register_exception_translator(raise_in_python);
  torchrelay::register_checkpoint(module);
  torchrelay::register_endpoint(module);
  torchrelay::register_mt19937(module);
  torchrelay::register_origin(module);
  torchrelay::register_shared_memory(module);
  torchrelay::register_group(module);
  torchrelay::register_call_rows(module);
  torchrelay::register_parameters(module);
  torchrelay::register_switch(module);
}
