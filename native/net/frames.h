// What the bytes of a connection mean: a greeting, then frames, each a header and its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/error.h"
#include "net/session.h"
#include "net/stream.h"

namespace torchrelay::net {

inline constexpr std::uint32_t kMagic = 0x41'4c'52'54;  // "TRLA"
inline constexpr std::uint16_t kVersion = 4;

// Precedes the frames of a connection, from the process that made it. Little-endian, as all supported
// machines.
struct Greeting {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  std::uint16_t reserved = 0;
  std::uint32_t rank = 0;  // of the sender, in a group
  SessionToken token{};
};
static_assert(sizeof(Greeting) == 28);

// Data: a message. Local: one whose bytes are in shared memory. Failed: why a group failed. Left: a farewell.
enum class FrameKind : std::uint8_t { kData, kLocal, kFailed, kLeft };

struct Frame {
  FrameKind kind = FrameKind::kData;
  std::uint8_t code = 0;
  std::uint16_t reserved = 0;
  std::int32_t local_tag = 0;
  std::int64_t tag = 0;
  std::uint64_t size_bytes = 0;  // of the message

  bool has_body() const noexcept { return kind == FrameKind::kData || kind == FrameKind::kFailed; }
};
static_assert(sizeof(Frame) == 24);

// The frame of a failure, and its body.
Frame failed_frame(const std::vector<std::byte>& body);
std::vector<std::byte> encode_failure(const Error& error);
// Nothing if the bytes are none.
std::optional<Error> decode_failure(const std::vector<std::byte>& body);

template <class Plain>
std::span<const std::byte> bytes_of(const Plain& value) {
  return std::as_bytes(std::span(&value, 1));
}

// Writes what the stream accepts of `parts` (at most 4), of which `sent` bytes have been written before.
struct Written {
  bool is_complete = false;
  bool ended = false;
};
Written write_rest(Stream& stream, std::initializer_list<std::span<const std::byte>> parts,
                   std::size_t& sent);

// Decides where frames go, for a FrameReader.
class FrameSink {
 public:
  // False: stop reading; the next read() opens this frame again.
  virtual bool open(const Frame& frame) = 0;
  // Where the body begins, asked for before each read; null: it is dropped.
  virtual std::byte* place() = 0;
  // The body is complete. False: stop reading.
  virtual bool close() = 0;

 protected:
  ~FrameSink() = default;
};

// Cuts the bytes of a stream into frames.
class FrameReader {
 public:
  // The buffer gets headers, and bodies that come with them.
  explicit FrameReader(std::size_t buffer_bytes)
      : buffer_(new std::byte[buffer_bytes]), capacity_(buffer_bytes) {}

  // Reads what has arrived, up to about `budget` bytes. False: the stream has ended.
  bool read(Stream& stream, FrameSink& sink, std::size_t& budget);

  const Frame& frame() const noexcept { return frame_; }

 private:
  const std::unique_ptr<std::byte[]> buffer_;
  const std::size_t capacity_;
  std::size_t begin_ = 0, size_ = 0;  // of what is in the buffer
  bool in_body_ = false;
  Frame frame_;
  std::size_t got_ = 0;  // of the body
};

}  // namespace torchrelay::net
