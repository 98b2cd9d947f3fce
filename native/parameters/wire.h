// The messages of the parameter manager: little-endian, packed, checked in full before anything is believed.
//
// Every message starts with a Header. Requests and replies are arrays, for batches of keys; what channels
// tell each other is a Bundle of Records, one key each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "net/endpoint.h"

namespace torchrelay::parameters {

constexpr std::uint32_t kProtocolMagic = 0x50525400;  // "\0TRP"; the lowest byte is the version
constexpr std::uint32_t kProtocolVersion = 3;

enum class Kind : std::uint16_t {
  kHello = 1,  // the sender's address; the first message of every stream
  kRequest,    // RequestHead, keys, epochs, positions, values
  kReply,      // ReplyHead, positions, epochs, values
  kRelay,      // a worker's endpoint id, then a reply: for a worker of the receiver's node
  kIntent,     // IntentHead, keys; from a worker of the same node
  kBundle,     // records
  kFence,      // a round id: answer once everything before it is done
  kFenceAck,   // the round id
  kFlush,      // a round id: refresh all replicas of your keys, then answer
  kFlushAck,   // the round id
  kHeartbeat,
  kLoss,     // a Loss: why the sender will stop, or has
  kGoodbye,  // the sender stops
};

struct Header {
  std::uint32_t magic = 0;
  std::uint32_t sender = 0;       // endpoint id
  std::uint32_t incarnation = 0;  // of the sender; a larger one starts a new stream
  std::uint32_t sequence = 0;     // from 0, per stream
  Kind kind{};
  std::uint16_t unused = 0;
  std::uint32_t count = 0;  // of keys or records
};
static_assert(sizeof(Header) == 24);

// A request's id: the requester's incarnation (of 24 bits), then the operation's own.
constexpr int kOperationBits = 40;
constexpr std::uint64_t first_request_id(std::uint32_t incarnation) {
  return std::uint64_t{incarnation} << kOperationBits;
}
constexpr std::uint32_t incarnation_of(std::uint64_t request_id) {
  return static_cast<std::uint32_t>(request_id >> kOperationBits);
}

struct RequestHead {
  std::uint64_t request_id;  // see first_request_id
  std::uint32_t requester;   // endpoint id
  std::uint32_t op;
};

struct ReplyHead {
  std::uint64_t request_id = 0;
  std::uint32_t owner = 0;  // the node that served it
  std::uint32_t op = 0;
  std::uint32_t served = 0;  // keys in this reply; arrays have room for header.count
  std::uint32_t unused = 0;
};

struct IntentHead {
  std::int64_t start;
  std::int64_t end;
};

enum class RecordKind : std::uint8_t {
  kAcquire = 1,  // to the owner, along owner lookups: `node` wants the key for as many uses as flags says
  // from a replica to the owner that granted it
  kUpdate,     // what `node` pushed to its replica, summed; payload: value, or none if kEmpty
  kOverwrite,  // a set on `node`'s replica; payload: value or row
  // from the owner
  kGrant,     // a replica; payload: row
  kLoan,      // a replica for one use, or a newer value for one; payload: value
  kTransfer,  // the ownership; payload: row
  kRefresh,   // a newer row for a replica; payload: value or row
  kAck,       // so many updates and overwrites as epoch says have been done, in the order of their sending
  kLocation,  // to the home: `node` owns the key now
  kRecall,    // from the home, which has no entry left: evict the key if it is unused
};

enum RecordFlag : std::uint8_t {
  kNoFlags = 0,
  kDrop = 1,      // update: the sender gives its replica up
  kAcks = 2,      // refresh: also the next ack
  kWholeRow = 4,  // overwrite and refresh: the payload is a row
  kEvicted = 8,   // location: the row is gone; the home initialises it again at its next use
  kEmpty = 16,    // update: nothing was pushed
};

struct Record {
  RecordKind kind{};
  std::uint8_t flags = 0;
  std::uint16_t node = 0;
  std::uint32_t epoch = 0;  // acquire: what it was sent by; transfer, location: the new one; else the owner's
  std::int64_t key = 0;
};
static_assert(sizeof(Record) == 16);

// Endpoint ids: channels and workers of nodes.
constexpr std::uint32_t kWorkerBit = 0x80000000u;
constexpr std::uint32_t channel_endpoint(std::uint32_t node, std::uint32_t channel) {
  return node << 12 | channel;
}
constexpr std::uint32_t worker_endpoint(std::uint32_t node, std::uint32_t worker) {
  return kWorkerBit | node << 12 | worker;
}
constexpr std::uint32_t node_of(std::uint32_t endpoint) { return (endpoint & ~kWorkerBit) >> 12; }
constexpr std::uint32_t index_of(std::uint32_t endpoint) { return endpoint & 0xfffu; }

// Reads a message front to back; throws kProtocol instead of reading past its end.
class Reader {
 public:
  Reader(const std::byte* data, std::size_t size_bytes) : at_(data), end_(data + size_bytes) {}

  template <typename T>
  T take() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, take_bytes(sizeof value), sizeof value);
    return value;
  }
  // `count` values in place; the sender keeps arrays aligned to their element.
  template <typename T>
  const T* take_array(std::size_t count) {
    return reinterpret_cast<const T*>(take_bytes(count * sizeof(T)));
  }
  const std::byte* take_bytes(std::size_t size_bytes) {
    if (size_bytes > remaining()) throw_short(size_bytes - remaining());
    const std::byte* data = at_;
    at_ += size_bytes;
    return data;
  }
  std::size_t remaining() const { return static_cast<std::size_t>(end_ - at_); }
  const std::byte* position() const { return at_; }

 private:
  [[noreturn]] static void throw_short(std::size_t missing_bytes);

  const std::byte* at_;
  const std::byte* end_;
};

// Writes a message of a size known beforehand.
class Writer {
 public:
  explicit Writer(std::size_t body_bytes) : message_(Message::allocate(sizeof(Header) + body_bytes)) {
    at_ = message_.data() + sizeof(Header);
  }
  template <typename T>
  void put(const T& value) {
    std::memcpy(skip(sizeof value), &value, sizeof value);
  }
  void put_bytes(const void* data, std::size_t size_bytes) {
    std::memcpy(skip(size_bytes), data, size_bytes);
  }
  template <typename T>
  T* array(std::size_t count) {
    return reinterpret_cast<T*>(skip(count * sizeof(T)));
  }
  std::byte* skip(std::size_t size_bytes) {
    std::byte* start = at_;
    at_ += size_bytes;
    return start;
  }
  std::byte* position() const { return at_; }
  // Ends the body where it stands.
  Message finish() {
    message_.shrink(static_cast<std::size_t>(at_ - message_.data()));
    return std::move(message_);
  }

 private:
  Message message_;
  std::byte* at_;
};

constexpr std::size_t padded(std::size_t size_bytes) { return (size_bytes + 7) / 8 * 8; }

}  // namespace torchrelay::parameters
