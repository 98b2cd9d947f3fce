#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "convert.h"
#include "core/error.h"
#include "core/shared_memory.h"
#include "register.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace torchrelay {
namespace {

// The buffer protocol: memoryview(segment) and torch.frombuffer(segment) keep the segment alive.
int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  auto* memory = nb::inst_ptr<SharedMemory>(self);
  return PyBuffer_FillInfo(view, self, memory->data(), static_cast<Py_ssize_t>(memory->size_bytes()),
                           memory->read_only(), flags);
}

PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

}  // namespace

void register_shared_memory(nb::module_& module) {
  module.def("anonymous_file", &anonymous_file, "label"_a, "size_bytes"_a = 0,
             "The descriptor of a new file without a name, in memory where memfd_create is allowed.");
  module.def("remedy", &remedy, "error"_a,
             "What to do where a call failed with this errno because something has run out; else empty.");
  nb::class_<SharedMemory>(module, "SharedMemory", nb::type_slots(slots),
                           "A block of memory that several processes of one host map; see buffers.Segment.")
      .def_static("create", &SharedMemory::create, "size_bytes"_a, "label"_a, "populate"_a = false,
                  Released())
      .def_static("attach", &SharedMemory::attach, "address"_a, "read_only"_a = false)
      .def_static("from_fd", &SharedMemory::from_fd, "fd"_a, "read_only"_a = false)
      .def_prop_ro("size_bytes", &SharedMemory::size_bytes)
      .def_prop_ro("read_only", &SharedMemory::read_only)
      .def_prop_ro("fd", &SharedMemory::fd)
      .def_prop_ro("address", &SharedMemory::address);
}

}  // namespace torchrelay
