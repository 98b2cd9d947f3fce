#include "group/call_rows.h"

#include <cstring>
#include <string>

#include "core/error.h"

namespace torchrelay {

CallRows::CallRows(int ranks, std::size_t payload_bytes)
    : ranks_(ranks), words_(1 + (payload_bytes + sizeof(std::uint64_t) - 1) / sizeof(std::uint64_t)) {
  if (ranks < 1) throw Error(Code::kArgument, "rows of " + std::to_string(ranks) + " ranks");
  sent_.resize(words_);
  received_.resize(words_ * static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank)
    payloads_.push_back(received() + row_bytes() * static_cast<std::size_t>(rank) + sizeof(std::uint64_t));
}

void CallRows::write(std::uint64_t digest, std::span<const std::byte> payload) {
  if (payload.size() > payload_bytes())
    throw Error(Code::kArgument, "a row holds " + std::to_string(payload_bytes()) + " bytes, not " +
                                     std::to_string(payload.size()));
  sent_[0] = digest;
  if (!payload.empty()) std::memcpy(sent_.data() + 1, payload.data(), payload.size());
}

int CallRows::first_difference() const noexcept {
  for (int rank = 0; rank < ranks_; ++rank)
    if (digest(rank) != sent_[0]) return rank;
  return -1;
}

void CallRows::reduce(Dtype dtype, Op op, std::byte* out, std::size_t count) const {
  if (count > payload_bytes() / size_bytes(dtype))
    throw Error(Code::kArgument, "a row holds " + std::to_string(payload_bytes()) + " bytes, not " +
                                     std::to_string(count) + " elements of " + name(dtype));
  find_kernel(dtype, op)(payloads_.data(), ranks_, out, count);
}

}  // namespace torchrelay
