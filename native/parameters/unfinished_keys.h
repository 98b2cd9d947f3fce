// Counts, for each key, a worker's unfinished operations on it: what a later one must not overtake.
//
// An open-addressing table with linear probing; a removal shifts later cells back, so it never fills up with
// tombstones. Used by one thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace torchrelay::parameters {

class UnfinishedKeys {
 public:
  // Operations of one class commute with each other: pushes of a table that adds, apart from all else.
  enum class Class : std::uint8_t { kAdd, kOther };

  void add(std::int64_t key, Class operation) {
    if (2 * (used_ + 1) > cells_.size()) grow();
    Cell& cell = cells_[place_of(key)];
    if (cell.total() == 0) {
      cell.key = key;
      ++used_;
    }
    ++cell.count(operation);
  }

  // Undoes an `add`.
  void remove(std::int64_t key, Class operation) {
    std::size_t hole = place_of(key);
    if (--cells_[hole].count(operation) != 0 || cells_[hole].total() != 0) return;
    --used_;
    for (std::size_t at = next(hole); cells_[at].total() != 0; at = next(at)) {
      const std::size_t home = hash(cells_[at].key);
      if (((at - home) & mask()) < ((at - hole) & mask())) continue;  // it is found from its home already
      cells_[hole] = std::exchange(cells_[at], Cell{});
      hole = at;
    }
  }

  // Is an operation on the key unfinished that does not commute with `operation`?
  bool conflicts(std::int64_t key, Class operation) const {
    if (used_ == 0) return false;
    const Cell& cell = cells_[place_of(key)];
    return operation == Class::kAdd ? cell.others != 0 : cell.total() != 0;
  }

  std::size_t size() const { return used_; }

 private:
  struct Cell {
    std::int64_t key = 0;
    std::uint32_t adds = 0, others = 0;  // both 0: the cell is free

    std::uint32_t total() const { return adds + others; }
    std::uint32_t& count(Class operation) { return operation == Class::kAdd ? adds : others; }
  };
  static constexpr std::size_t kFirstCells = 1024;

  std::size_t mask() const { return cells_.size() - 1; }
  std::size_t next(std::size_t at) const { return (at + 1) & mask(); }
  std::size_t hash(std::int64_t key) const {
    const std::uint64_t mixed = static_cast<std::uint64_t>(key) * 0x9e3779b97f4a7c15u;
    return static_cast<std::size_t>(mixed >> 32) & mask();
  }
  // The key's cell, or the free one where it belongs.
  std::size_t place_of(std::int64_t key) const {
    std::size_t at = hash(key);
    while (cells_[at].total() != 0 && cells_[at].key != key) at = next(at);
    return at;
  }
  void grow() {
    std::vector<Cell> before(std::max(kFirstCells, 2 * cells_.size()));
    before.swap(cells_);
    for (const Cell& cell : before)
      if (cell.total() != 0) cells_[place_of(cell.key)] = cell;
  }

  std::vector<Cell> cells_;  // a power of two
  std::size_t used_ = 0;
};

}  // namespace torchrelay::parameters
