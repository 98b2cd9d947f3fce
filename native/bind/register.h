// What each binding file adds to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace torchrelay {

void register_shared_memory(nanobind::module_& module);

}  // namespace torchrelay
