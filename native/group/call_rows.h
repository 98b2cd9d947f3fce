// Rows that the ranks of a communicator exchange with each collective: a digest of the call, then a payload.
//
// All rows have one length, whatever is called, so ranks that call different functions still exchange them
// and every rank finds the difference. Not thread-safe; the caller moves the bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/dtype.h"
#include "core/reduce.h"

namespace torchrelay {

class CallRows {
 public:
  // The payload's size is rounded up to whole words. Throws kArgument if there are no ranks.
  CallRows(int ranks, std::size_t payload_bytes);

  int ranks() const noexcept { return ranks_; }
  std::size_t row_bytes() const noexcept { return words_ * sizeof(std::uint64_t); }
  std::size_t payload_bytes() const noexcept { return row_bytes() - sizeof(std::uint64_t); }

  // The row to send, and where the rows of all ranks arrive, in the order of ranks.
  std::byte* sent() noexcept { return reinterpret_cast<std::byte*>(sent_.data()); }
  std::byte* received() noexcept { return reinterpret_cast<std::byte*>(received_.data()); }

  // Fills the row to send. Throws kArgument if the payload is too long.
  void write(std::uint64_t digest, std::span<const std::byte> payload);

  // What arrived.
  std::uint64_t digest(int rank) const noexcept { return received_[words_ * static_cast<std::size_t>(rank)]; }
  const std::byte* payload(int rank) const noexcept { return payloads_[static_cast<std::size_t>(rank)]; }

  // The first rank whose digest is not the one that was sent; -1 if there is none.
  int first_difference() const noexcept;

  // Reduces the payloads of all ranks, `count` elements each, in the order of ranks. Throws kArgument if they
  // are longer than a payload, or the operation is undefined for the dtype.
  void reduce(Dtype dtype, Op op, std::byte* out, std::size_t count) const;

 private:
  int ranks_;
  std::size_t words_;  // of a row
  std::vector<std::uint64_t> sent_;
  std::vector<std::uint64_t> received_;
  std::vector<const std::byte*> payloads_;
};

}  // namespace torchrelay
