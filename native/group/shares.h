// How a message is divided among those that reduce it.
#pragma once

#include <algorithm>
#include <cstddef>

namespace torchrelay {

// A message of `size` bytes in blocks, each block in a share for each worker.
struct Shares {
  // They start at multiples of this, so that no cache line has two writers.
  static constexpr std::size_t kLine = 64;

  struct Span {
    std::size_t start, size;  // bytes of the message
  };

  std::size_t size, block, workers;

  std::size_t blocks() const { return (size + block - 1) / block; }
  std::size_t length(std::size_t at) const { return std::min(block, size - at * block); }

  Span of(std::size_t at, std::size_t worker) const {
    const std::size_t share = (length(at) + workers * kLine - 1) / (workers * kLine) * kLine;
    const std::size_t from = std::min(length(at), worker * share);
    return {at * block + from, std::min(share, length(at) - from)};
  }
};

}  // namespace torchrelay
