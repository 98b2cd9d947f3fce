#include "torchrelay/transport/transfer.h"

#include <string>
#include <vector>

#include "torchrelay/dtype.h"

namespace torchrelay {
namespace {

std::string text(Described message) {
  const std::string type = message.code < static_cast<unsigned>(kNumDtypes)
                               ? name(static_cast<Dtype>(message.code))
                               : "type " + std::to_string(message.code);
  return std::to_string(message.size_bytes) + " bytes of " + type;
}

}  // namespace

Error mismatch(int me, int source, std::int64_t tag, Described sent, Described expected) {
  const std::string sender = "rank " + std::to_string(source);
  return {Code::kMismatch, "rank " + std::to_string(me) + ", recv from " + sender + ", tag " +
                               std::to_string(tag) + ": " + sender + " sent " + text(sent) +
                               ", but the receiver expects " + text(expected) +
                               "; use the same shape and dtype on both"};
}

Error late(int me, const char* what, const int* peer, std::int64_t tag) {
  const std::string whom = peer == nullptr ? "any rank" : "rank " + std::to_string(*peer);
  return {Code::kTimeout,
          "rank " + std::to_string(me) + ", " + what + whom + ", tag " + std::to_string(tag) +
              ": no answer within the timeout; did the other side make its call? A longer timeout can be "
              "given to init_process_group",
          peer == nullptr ? std::vector<int>{} : std::vector<int>{*peer}};
}

}  // namespace torchrelay
