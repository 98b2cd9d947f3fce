#include <nanobind/nanobind.h>

#include "core/origin.h"
#include "register.h"

namespace nb = nanobind;

namespace torchrelay {

void register_origin(nb::module_& module) {
  nb::class_<Origin>(module, "Origin", "The process in which it was made.")
      .def(nb::init<>())
      .def_prop_ro("is_forked", &Origin::is_forked,
                   "Whether this process was forked from it. Costs no system call.")
      .def_prop_ro("pid", &Origin::pid);
}

}  // namespace torchrelay
