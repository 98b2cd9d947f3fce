#include "group/transfer.h"

#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/error.h"

namespace torchrelay {
namespace {

std::string text(std::uint64_t size_bytes, std::uint64_t code) {
  const std::string type = code < static_cast<unsigned>(kNumDtypes) ? name(static_cast<Dtype>(code))
                                                                    : "type " + std::to_string(code);
  return std::to_string(size_bytes) + " bytes of " + type;
}

}  // namespace

std::exception_ptr Transfer::mismatch(int me, int source, std::uint64_t code) const {
  if (found_bytes_ == data_.size_bytes && code == code_) return nullptr;
  const std::string sender = "rank " + std::to_string(source);
  return std::make_exception_ptr(
      Error(Code::kMismatch, "rank " + std::to_string(me) + ", recv from " + sender + ", tag " +
                                 std::to_string(found_tag_) + ": " + sender + " sent " +
                                 text(found_bytes_, code) + ", but the receiver expects " +
                                 text(data_.size_bytes, code_) + "; use the same shape and dtype on both"));
}

std::exception_ptr Transfer::late(int me, int peer) const {
  const std::string whom = peer == kAnyRank ? "any rank" : "rank " + std::to_string(peer);
  return std::make_exception_ptr(
      Error(Code::kTimeout,
            "rank " + std::to_string(me) + (sends_ ? ", send to " : ", recv from ") + whom + ", tag " +
                std::to_string(tag_) +
                ": no answer within the timeout; did the other side make its call? A longer timeout can be "
                "given to init_process_group",
            peer == kAnyRank ? std::vector<int>{} : std::vector<int>{peer}));
}

}  // namespace torchrelay
