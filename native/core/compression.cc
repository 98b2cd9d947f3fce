#include "core/compression.h"

#include "core/compression_table.h"

namespace torchrelay {

const Codec* find_codec(Compression compression, Dtype dtype, Op op, const std::string& instruction_set) {
  if (op != Op::kSum && op != Op::kAverage && op != Op::kPremulSum) return nullptr;
#if defined(__x86_64__)
  if (instruction_set == "avx512") return avx512::codec(compression, dtype);
  if (instruction_set == "avx2") return avx2::codec(compression, dtype);
#endif
  return baseline::codec(compression, dtype);
}

const Codec* find_codec(Compression compression, Dtype dtype, Op op) {
  static const std::string best = instruction_sets().front();
  return find_codec(compression, dtype, op, best);
}

}  // namespace torchrelay
