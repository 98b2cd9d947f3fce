// Requests of workers for batches of keys, and the replies to them, as messages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "parameters/store.h"
#include "parameters/wire.h"

namespace torchrelay::parameters {

// A request in place: it points into its message.
struct Request {
  RequestHead head;
  Op op;
  std::uint32_t count;  // of keys
  const std::int64_t* keys;
  const std::uint32_t* epochs;     // the epoch of the owner lookup by which each key was sent here
  const std::uint32_t* positions;  // the requester's, to be returned
  const std::byte* values;         // null: a read
  std::size_t value_bytes;         // of all keys, to be read or written
};

// The part of a request that is about one key.
struct KeyRequest {
  RequestHead head;
  std::int64_t key;
  std::uint32_t epoch;
  std::uint32_t position;
  const std::byte* value;  // null: a read
};

// Throws kProtocol or kArgument if the message is no request of the channel.
Request decode_request(const Store& store, std::uint32_t channel_id, const Header& header,
                       const Message& message);
Message encode_request(const Store& store, const RequestHead& head, const KeyRequest* requests,
                       std::size_t count);

// The reply to one key's write. It contains no owner lookup.
Message encode_acknowledgement(const KeyRequest& request, std::uint32_t node);
// Of the worker that a reply is for.
std::uint32_t requester_incarnation(const Message& reply);

// The reply to a request, of the keys that are served here. For a read, the store writes rows to values() as
// if all keys were served; add() closes the gaps.
class ReplyWriter {
 public:
  explicit ReplyWriter(const Request& request);

  std::byte* values() { return values_; }
  // The request's i-th key was served; its row begins `offset` bytes from values().
  void add(std::size_t i, std::uint32_t epoch, std::size_t offset, std::size_t size_bytes);
  std::uint32_t served() const { return served_; }
  Message finish(std::uint32_t node);

 private:
  const Request& request_;
  Writer writer_;
  ReplyHead* head_;
  std::uint32_t* positions_;
  std::uint32_t* epochs_;
  std::byte* values_;
  std::uint32_t served_ = 0;
};

}  // namespace torchrelay::parameters
