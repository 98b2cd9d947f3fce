#include "torchrelay/reduce.h"

#include <utility>

#include "reduce_table.h"
#include "torchrelay/error.h"

namespace torchrelay {
namespace {

using Find = Kernel (*)(Dtype, Op);

std::vector<std::pair<std::string, Find>> available() {
  std::vector<std::pair<std::string, Find>> found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    found.emplace_back("avx512", avx512::kernel);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
    found.emplace_back("avx2", avx2::kernel);
#endif
  found.emplace_back("baseline", baseline::kernel);
  return found;
}

Kernel checked(Kernel kernel, Dtype dtype, Op op) {
  if (kernel == nullptr)
    throw Error(Code::kArgument, std::string("reduction: ") + name(op) + " of " + name(dtype) +
                                     " is not defined; it needs an integer type");
  return kernel;
}

}  // namespace

Kernel find_kernel(Dtype dtype, Op op) {
  static const Find best = available().front().second;
  return checked(best(dtype, op), dtype, op);
}

Kernel find_kernel(Dtype dtype, Op op, const std::string& instruction_set) {
  for (const auto& [set, find] : available())
    if (set == instruction_set) return checked(find(dtype, op), dtype, op);
  throw Error(Code::kArgument, "reduction: this machine has no instruction set '" + instruction_set + "'");
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const auto& entry : available()) names.push_back(entry.first);
  return names;
}

}  // namespace torchrelay
