// A set of indices in shared memory: any process marks, one thread takes all that are marked.
//
// A bitmap with two summaries, a bit for each word of the level below, so that taking costs next to nothing
// where nothing is marked: one load per 262,144 indices. Marking is idempotent and takes no lock; a process
// that is killed while marking leaves at most one index unmarked.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace torchrelay::parameters {

class MarkSet {
 public:
  using Word = std::atomic<std::uint64_t>;

  // Of a set of indices below `size`.
  static std::uint64_t bytes(std::uint64_t size) {
    std::uint64_t words = 0;
    for (std::size_t level = 0; level < kLevels; ++level) words += size = words_of(size);
    return words * sizeof(Word);
  }

  MarkSet() = default;
  // `memory` holds zeros, or what other views of it have marked.
  MarkSet(std::byte* memory, std::uint64_t size) {
    auto* words = reinterpret_cast<Word*>(memory);
    for (Word*& level : levels_) {
      level = words;
      words += size = words_of(size);
    }
    top_words_ = size;
  }

  // What the caller writes under a lock that the visit takes too, the visit sees.
  void mark(std::uint64_t index) const {
    for (Word* const level : levels_) {  // from below: a taken word's bits are already set in the level below
      Word& word = level[index / kBits];
      const std::uint64_t bit = std::uint64_t{1} << index % kBits;
      if ((word.load() & bit) == 0) word.fetch_or(bit);
      index /= kBits;
    }
  }

  // Unmarks and visits each marked index; one that is marked meanwhile is visited now or next time.
  template <typename Visit>
  void take_all(const Visit& visit) const {
    for (std::uint64_t word = 0; word < top_words_; ++word) take(kLevels - 1, word, visit);
  }

 private:
  static constexpr std::size_t kLevels = 3;
  static constexpr std::uint64_t kBits = 64;

  static std::uint64_t words_of(std::uint64_t size) { return (size + kBits - 1) / kBits; }

  template <typename Visit>
  void take(std::size_t level, std::uint64_t word, const Visit& visit) const {
    if (levels_[level][word].load() == 0) return;
    for (std::uint64_t bits = levels_[level][word].exchange(0); bits != 0; bits &= bits - 1) {
      const std::uint64_t index = word * kBits + static_cast<std::uint64_t>(std::countr_zero(bits));
      level == 0 ? visit(index) : take(level - 1, index, visit);
    }
  }

  std::array<Word*, kLevels> levels_{};  // the indices' own words first
  std::uint64_t top_words_ = 0;
};

}  // namespace torchrelay::parameters
