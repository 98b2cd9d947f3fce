#include "switch/kernels.h"

#include "core/error.h"
#include "switch/packet_kernel_table.h"

namespace torchrelay::switchml {
namespace {

const Kernels* avx2_kernels() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return &avx2::kKernels;
#endif
  return nullptr;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels* const best = avx2_kernels() != nullptr ? avx2_kernels() : &baseline::kKernels;
  return *best;
}

const Kernels& kernels(const std::string& instruction_set) {
  if (instruction_set == "baseline") return baseline::kKernels;
  if (instruction_set == "avx2" && avx2_kernels() != nullptr) return *avx2_kernels();
  throw Error(Code::kArgument, "switch: this machine has no instruction set '" + instruction_set + "'");
}

}  // namespace torchrelay::switchml
