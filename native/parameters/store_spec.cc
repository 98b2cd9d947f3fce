#include "parameters/store_spec.h"

#include <algorithm>
#include <cstdio>
#include <string>

#include "core/error.h"
#include "core/host_memory.h"
#include "parameters/slab_layout.h"

namespace torchrelay::parameters {
namespace {

constexpr std::uint32_t kMaxLength = 1u << 28;

// What a node needs: the entries of all keys, and the rows of its share. Replicas come on top.
void check_memory(const StoreSpec& spec) {
  constexpr double kGiB = 1 << 30;
  const double keys = static_cast<double>(std::max(spec.num_keys, spec.capacity));
  double elements = 0;
  for (const std::uint32_t length : spec.lengths)
    elements += static_cast<double>(length + spec.rule.state_length(spec.dtype, length));
  if (spec.lengths.size() == 1) elements *= keys;
  if (spec.num_keys != 0) elements /= spec.num_nodes;
  const double rows = elements * static_cast<double>(size_bytes(spec.dtype));
  const double entries = keys * (sizeof(Entry) + sizeof(std::uint32_t));  // and the location epochs
  const auto available = static_cast<double>(host_memory_bytes());
  if (rows + entries <= available) return;
  char sizes[160];
  std::snprintf(sizes, sizeof sizes, "%.1f GiB for rows and %.1f GiB to find them", rows / kGiB,
                entries / kGiB);
  char limit[32];
  std::snprintf(limit, sizeof limit, "%.1f GiB", available / kGiB);
  throw Error(Code::kArgument,
              "parameters: node " + std::to_string(spec.node) + " of " + std::to_string(spec.num_nodes) +
                  " would need " + sizes + ", but this host has " + limit +
                  "; use more hosts, fewer keys or shorter rows, or a table without a number "
                  "of keys, which evicts those least used");
}

}  // namespace

void check(const StoreSpec& spec) {
  const auto fail = [](const std::string& message) {
    throw Error(Code::kArgument, "parameters: " + message);
  };
  if (spec.num_nodes < 1 || spec.num_nodes > kMaxNodes || spec.node >= spec.num_nodes)
    fail("node " + std::to_string(spec.node) + " of " + std::to_string(spec.num_nodes) +
         " does not exist; at most " + std::to_string(kMaxNodes) + " nodes");
  if (spec.num_channels < 1 || spec.num_channels > kMaxChannels)
    fail(std::to_string(spec.num_channels) + " channels; from 1 to " + std::to_string(kMaxChannels) +
         " are possible");
  if (spec.lengths.empty() || std::ranges::find(spec.lengths, 0u) != spec.lengths.end())
    fail("every key's length must be at least 1");
  if (const std::uint32_t longest = *std::ranges::max_element(spec.lengths); longest > kMaxLength)
    fail("a length of " + std::to_string(longest) + " elements; at most " + std::to_string(kMaxLength));
  if (spec.num_keys == 0 && spec.capacity == 0) fail("a table without a number of keys needs a capacity");
  if (spec.lengths.size() != 1 && spec.lengths.size() != spec.num_keys)
    fail("there are " + std::to_string(spec.lengths.size()) + " lengths for " +
         std::to_string(spec.num_keys) + " keys");
  if (!is_table_dtype(spec.dtype)) fail(std::string("no table has values of ") + name(spec.dtype));
  if (!spec.rule.allows(spec.dtype)) fail("optimizers inside the store need floating-point values");
  const std::uint64_t rows = std::max(spec.num_keys, spec.capacity);
  if (rows >= kNoSlot) fail(std::to_string(rows) + " keys; a table has less than " + std::to_string(kNoSlot));
  check_memory(spec);
}

}  // namespace torchrelay::parameters
