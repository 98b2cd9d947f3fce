#include "group/call.h"

#include <cstdio>

namespace torchrelay {

Call reduction_call(Kind kind, std::size_t count, Dtype dtype, Op op, int root, Compression compression) {
  return {kind, static_cast<std::uint8_t>(dtype), op, compression, root, count};
}

Call bytes_call(Kind kind, std::uint8_t code, int root, std::size_t count) {
  return {kind, code, Op::kSum, Compression::kNone, root, count};
}

std::string describe(const Call& call, const std::vector<int>& names) {
  if (call.kind == Kind::kCoalesced) {
    char digest[17];
    std::snprintf(digest, sizeof digest, "%016llx", static_cast<unsigned long long>(call.count));
    return std::to_string(call.root) +
           " coalesced calls, whose kinds, sizes, dtypes and reductions have the " + "digest " + digest;
  }
  std::string out = name(call.kind);
  if (call.kind == Kind::kBarrier) return out;
  out += " of ";
  const bool is_known = call.dtype < kNumDtypes;
  const auto dtype = static_cast<Dtype>(call.dtype);
  const bool reduces = is_reduction(call.kind);
  const std::size_t unit = reduces || !is_known ? 1 : size_bytes(dtype);
  if (call.count != 0 || reduces) out += std::to_string(call.count / unit) + " x ";
  out += is_known ? name(dtype) : "bytes";
  if (reduces) out += std::string(", ") + name(call.op);
  if (call.compression != Compression::kNone)
    out += std::string(", with compression ") + name(call.compression);
  if (call.root >= 0) out += ", root " + std::to_string(names[static_cast<std::size_t>(call.root)]);
  return out;
}

std::string describe_difference(const std::vector<Call>& calls, const std::vector<int>& names) {
  std::string out = "the ranks made different calls: ";
  for (std::size_t rank = 0; rank < calls.size(); ++rank)
    out += (rank == 0 ? "rank " : "; rank ") + std::to_string(names[rank]) + " made " +
           describe(calls[rank], names);
  return out + ". All ranks of a group must make the same calls in the same order";
}

}  // namespace torchrelay
