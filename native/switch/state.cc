#include "switch/state.h"

#include <algorithm>

#include "core/error.h"
#include "switch/kernels.h"

namespace torchrelay::switchml {
namespace {

constexpr std::size_t kWordBits = 64;

}  // namespace

SlotTable::SlotTable(const TableShape& shape)
    : shape_(shape), words_((shape.num_workers + kWordBits - 1) / kWordBits) {
  if (shape.num_workers == 0 || shape.num_slots == 0 || shape.num_slots > kMaxSlots ||
      !is_packet_numel(shape.numel))
    throw Error(
        Code::kArgument,
        "switch: a session needs at least 1 worker, 1 to 8192 slots, and packets of 64 or 256 values");
  const std::size_t sets = std::size_t{shape.num_slots} * 2;
  sets_.resize(sets);
  bitmaps_.resize(sets * words_);
  ports_.resize(sets * shape.num_workers);
  values_.resize(sets * shape.numel);
}

bool SlotTable::is_empty(std::size_t at) const noexcept {
  const Word* bitmap = &bitmaps_[at * words_];
  return std::all_of(bitmap, bitmap + words_, [](Word word) { return word == 0; });
}

bool SlotTable::is_stale(const Set& set, std::uint32_t tsi, bool any, bool seen) const noexcept {
  if (!set.used) return false;
  if (!any) return static_cast<std::int32_t>(tsi - set.tsi) <= 0;
  // A worker that is not in a complete set has its result, and has moved on.
  return tsi != set.tsi || (!seen && set.count == 0);
}

Verdict SlotTable::apply(const Header& header, const std::byte* payload, std::uint32_t rank,
                         std::uint16_t port) {
  if (header.slot >= shape_.num_slots || header.numel != shape_.numel) return Verdict::kRejected;
  const std::size_t at = index(header.slot, header.set);
  Set& set = sets_[at];
  const std::size_t word = rank / kWordBits;
  const Word bit = Word{1} << (rank % kWordBits);
  Word& mine = bitmaps_[at * words_ + word];
  const bool seen = (mine & bit) != 0;
  const bool any = seen || !is_empty(at);
  if (shape_.sequenced && is_stale(set, header.tsi, any, seen)) return Verdict::kStale;

  mine |= bit;
  bitmaps_[(at ^ 1) * words_ + word] &= ~bit;
  ports_[at * shape_.num_workers + rank] = port;
  if (seen && set.is_partial) return rank == 0 ? Verdict::kForward : Verdict::kDuplicate;
  if (seen) return set.count == 0 ? Verdict::kUnicast : Verdict::kDuplicate;

  std::int32_t* values = &values_[at * shape_.numel];
  if (!any) {
    kernels().load(values, payload, shape_.numel);
    set.exponent = header.exponent;
    set.second_exponent = header.second_exponent;
    set.tsi = header.tsi;
    set.used = true;
  } else {
    kernels().add(values, payload, shape_.numel);
    set.exponent = std::max(set.exponent, header.exponent);
    set.second_exponent = std::max(set.second_exponent, header.second_exponent);
  }
  const bool last = set.count == 1 || shape_.num_workers == 1;
  set.count = set.count == 0 ? shape_.num_workers - 1 : set.count - 1;
  set.is_partial = last && shape_.is_leaf;
  if (!last) return Verdict::kConsumed;
  return set.is_partial ? Verdict::kForward : Verdict::kMulticast;
}

bool SlotTable::accept(const Header& header, const std::byte* payload) {
  if (header.slot >= shape_.num_slots || header.numel != shape_.numel) return false;
  const std::size_t at = index(header.slot, header.set);
  Set& set = sets_[at];
  if (!set.is_partial || header.tsi != set.tsi) return false;
  kernels().load(&values_[at * shape_.numel], payload, shape_.numel);
  set.exponent = header.exponent;
  set.second_exponent = header.second_exponent;
  set.is_partial = false;
  return true;
}

void SlotTable::result(const Header& header, std::byte* out) const {
  const std::size_t at = index(header.slot, header.set);
  Header answer = header;
  answer.exponent = sets_[at].exponent;
  answer.second_exponent = sets_[at].second_exponent;
  serialize(answer, out);
  kernels().store(out + kHeaderBytes, &values_[at * shape_.numel], shape_.numel);
}

std::uint16_t SlotTable::port(const Header& header, std::uint32_t rank) const {
  return ports_[index(header.slot, header.set) * shape_.num_workers + rank];
}

std::vector<std::uint32_t> SlotTable::missing() const {
  std::vector<Word> present(words_, ~Word{0});
  for (std::size_t at = 0; at < sets_.size(); ++at)
    if (sets_[at].count != 0)
      for (std::size_t word = 0; word < words_; ++word) present[word] &= bitmaps_[at * words_ + word];
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t rank = 0; rank < shape_.num_workers; ++rank)
    if ((present[rank / kWordBits] >> (rank % kWordBits) & 1) == 0) ranks.push_back(rank);
  return ranks;
}

}  // namespace torchrelay::switchml
