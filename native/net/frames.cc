#include "net/frames.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "core/error.h"

namespace torchrelay::net {
namespace {

constexpr std::size_t kReadBytes = std::size_t{256} << 10;  // of a body at a time
constexpr std::size_t kDroppedBytes = std::size_t{16} << 10;
constexpr std::size_t kMaxParts = 4;
constexpr std::size_t kMaxText = 4096;
constexpr std::size_t kMaxRanks = 4096;

// A failure as it is sent: this, then the ranks, then the text.
struct Report {
  std::uint32_t is_timeout;
  std::uint32_t ranks;
};

}  // namespace

Frame failed_frame(const std::vector<std::byte>& body) {
  return {.kind = FrameKind::kFailed, .size_bytes = body.size()};
}

std::vector<std::byte> encode_failure(const Error& error) {
  const std::string text = std::string(error.what()).substr(0, kMaxText);
  const std::size_t count = std::min(error.ranks().size(), kMaxRanks);
  const Report report{error.code() == Code::kTimeout, static_cast<std::uint32_t>(count)};
  std::vector<std::byte> out(sizeof report + count * sizeof(std::int32_t) + text.size());
  std::memcpy(out.data(), &report, sizeof report);
  auto* ranks = out.data() + sizeof report;
  for (std::size_t i = 0; i < count; ++i) {
    const auto rank = static_cast<std::int32_t>(error.ranks()[i]);
    std::memcpy(ranks + i * sizeof rank, &rank, sizeof rank);
  }
  std::memcpy(ranks + count * sizeof(std::int32_t), text.data(), text.size());
  return out;
}

std::optional<Error> decode_failure(const std::vector<std::byte>& body) {
  Report report;
  if (body.size() < sizeof report) return std::nullopt;
  std::memcpy(&report, body.data(), sizeof report);
  const std::size_t start = sizeof report + std::size_t{report.ranks} * sizeof(std::int32_t);
  if (report.ranks > kMaxRanks || start > body.size() || report.is_timeout > 1) return std::nullopt;
  std::vector<int> ranks(report.ranks);
  for (std::size_t i = 0; i < ranks.size(); ++i)
    std::memcpy(&ranks[i], body.data() + sizeof report + i * sizeof(std::int32_t), sizeof(std::int32_t));
  const auto* text = reinterpret_cast<const char*>(body.data() + start);
  return Error(report.is_timeout != 0 ? Code::kTimeout : Code::kPeerLost,
               std::string(text, body.size() - start), std::move(ranks));
}

Written write_rest(Stream& stream, std::initializer_list<std::span<const std::byte>> parts,
                   std::size_t& sent) {
  std::array<iovec, kMaxParts> rest;
  int count = 0;
  std::size_t skip = sent, left = 0;
  for (const auto part : parts) {
    const std::size_t skipped = std::min(skip, part.size());
    skip -= skipped;
    if (part.size() == skipped) continue;
    rest[static_cast<std::size_t>(count++)] = {const_cast<std::byte*>(part.data()) + skipped,
                                               part.size() - skipped};
    left += part.size() - skipped;
  }
  if (left == 0 && !stream.has_unsent()) return {.is_complete = true};
  const Moved moved = stream.write(rest.data(), count);
  sent += moved.size_bytes;
  return {moved.size_bytes == left && !stream.has_unsent(), moved.ended};
}

bool FrameReader::read(Stream& stream, FrameSink& sink, std::size_t& budget) {
  bool is_drained = false;  // the last read got less than it could hold
  std::array<std::byte, kDroppedBytes> dropped;
  const auto read_into = [&](std::byte* data, std::size_t wanted) {
    const Moved moved = stream.read(data, wanted);
    budget -= std::min(budget, moved.size_bytes);
    is_drained = moved.size_bytes < wanted;
    return moved;
  };
  for (;;) {
    if (!in_body_ && size_ >= sizeof(Frame)) {
      std::memcpy(&frame_, buffer_.get() + begin_, sizeof(Frame));
      if (!sink.open(frame_)) return true;
      begin_ += sizeof(Frame);
      size_ -= sizeof(Frame);
      in_body_ = true;
      got_ = 0;
    } else if (!in_body_) {
      if (is_drained || budget == 0) return true;  // the loop comes again
      std::memmove(buffer_.get(), buffer_.get() + begin_, size_);
      begin_ = 0;
      const Moved moved = read_into(buffer_.get() + size_, capacity_ - size_);
      size_ += moved.size_bytes;
      if (moved.ended) return false;
      continue;
    }
    const std::size_t body = frame_.has_body() ? frame_.size_bytes : 0;
    std::byte* to = sink.place();
    std::size_t size = std::min(body - got_, size_);
    if (size != 0) {
      if (to != nullptr) std::memcpy(to + got_, buffer_.get() + begin_, size);
      begin_ += size;
      size_ -= size;
    } else if (got_ != body) {
      if (is_drained || budget == 0) return true;
      const std::size_t longest = to != nullptr ? kReadBytes : dropped.size();
      const std::size_t wanted = std::min({body - got_, longest, budget});
      const Moved moved = read_into(to != nullptr ? to + got_ : dropped.data(), wanted);
      if (moved.ended) return false;
      size = moved.size_bytes;
    }
    got_ += size;
    if (got_ != body) continue;
    in_body_ = false;
    if (!sink.close()) return true;
  }
}

}  // namespace torchrelay::net
