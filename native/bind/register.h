// What each binding file adds to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace torchrelay {

void register_call_rows(nanobind::module_& module);
void register_checkpoint(nanobind::module_& module);
void register_endpoint(nanobind::module_& module);
void register_group(nanobind::module_& module);
void register_mt19937(nanobind::module_& module);
void register_origin(nanobind::module_& module);
void register_parameters(nanobind::module_& module);
void register_shared_memory(nanobind::module_& module);
void register_switch(nanobind::module_& module);

}  // namespace torchrelay
