// What all ranks of a group must agree on in one collective.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/compression.h"

namespace torchrelay {

enum class Kind : std::uint8_t {
  kNone,
  kAllReduce,
  kReduce,
  kReduceScatter,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kAllToAll,
  kBarrier,
  kCoalesced,
};

// By Kind.
inline constexpr const char* kKindNames[] = {"nothing",    "all_reduce", "reduce",   "reduce_scatter",
                                             "broadcast",  "all_gather", "gather",   "scatter",
                                             "all_to_all", "barrier",    "coalesced"};

constexpr const char* name(Kind kind) noexcept { return kKindNames[static_cast<int>(kind)]; }

constexpr bool is_reduction(Kind kind) noexcept {
  return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
}

struct Call {
  Kind kind = Kind::kNone;
  std::uint8_t dtype = 0;
  Op op = Op::kSum;
  Compression compression = Compression::kNone;
  std::int32_t root = -1;
  // Elements of a reduction, bytes of a broadcast, a digest of coalesced calls; 0 where each pair of ranks
  // has its own size.
  std::uint64_t count = 0;

  bool operator==(const Call&) const = default;
};
static_assert(sizeof(Call) == 16);

Call reduction_call(Kind kind, std::size_t count, Dtype dtype, Op op, int root = -1,
                    Compression compression = Compression::kNone);
// `code` is the caller's code of the element type.
Call bytes_call(Kind kind, std::uint8_t code, int root = -1, std::size_t count = 0);

// For messages; `names` are the ranks as users know them.
std::string describe(const Call& call, const std::vector<int>& names);

// "the ranks made different calls: rank 0 made ..."; `calls` are those of all ranks.
std::string describe_difference(const std::vector<Call>& calls, const std::vector<int>& names);

}  // namespace torchrelay
