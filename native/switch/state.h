// The switch's slots: the algorithm of SwitchML's P4 program as a function of one packet and one table.
//
// A slot has two sets, which a worker uses in turn: it sends to one set only after it has the result of the
// other, so a packet for a set says that its sender needs the other set's result no more. That is why a lost
// result can be asked for again with no further message.
//
// As in the P4 program, the network between a worker and the switch must not deliver a packet after the same
// worker has used the slot twice more. A *sequenced* session does not depend on that: its workers' tsi only
// ever grow (modulo 2^32), and what is older than the slot's newest packet changes nothing.
//
// The table of a *leaf*, a switch with another one above it, completes a slot in two steps: when its workers'
// packets are there, their sum goes up (kForward); the result that comes down takes its place (accept()). A
// leaf needs no timers: while the result is missing, its workers send again, and so does the leaf.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "switch/wire.h"

namespace torchrelay::switchml {

struct TableShape {
  std::uint32_t num_workers = 1;
  std::uint16_t num_slots = 1;
  std::uint16_t numel = kMaxNumel;
  bool sequenced = false;
  bool is_leaf = false;
};

enum class Verdict : std::uint8_t {
  kConsumed,   // counted; others are missing
  kMulticast,  // counted, and it was the last: every worker gets the result
  kForward,    // of a leaf, instead of kMulticast and for the first worker's retransmissions: the sum goes up
  kUnicast,    // the worker's retransmission of a complete packet: it gets the result again
  kDuplicate,  // the worker's retransmission of an incomplete packet: nothing to do
  kStale,      // of a sequenced session, from before the slot's newest packet: nothing to do
  kRejected,   // the slot does not exist, or the size is not the session's: nothing to do
};

// Not thread-safe. Memory is allocated once: num_slots * 2 * (4 * numel + 2 * num_workers + 16) bytes or so.
class SlotTable {
 public:
  explicit SlotTable(const TableShape& shape);

  // Applies a packet of worker `rank` (< num_workers), whose answer is to go to its UDP port `port`.
  Verdict apply(const Header& header, const std::byte* payload, std::uint32_t rank, std::uint16_t port);

  // Takes a result of the switch above, and returns whether every worker gets it now.
  bool accept(const Header& header, const std::byte* payload);

  // Writes the answer to a packet that apply() gave kMulticast or kUnicast, or the sum that is to go up:
  // packet_bytes(numel) bytes.
  void result(const Header& header, std::byte* out) const;

  // The port of worker `rank`'s last packet for this slot and set.
  std::uint16_t port(const Header& header, std::uint32_t rank) const;

  // The workers that packets in progress wait for, in order.
  std::vector<std::uint32_t> missing() const;

  const TableShape& shape() const noexcept { return shape_; }

 private:
  struct Set {
    std::uint32_t count = 0;  // workers missing; 0: complete, or never used
    std::uint32_t tsi = 0;
    std::int8_t exponent = 0;
    std::int8_t second_exponent = 0;
    bool used = false;
    bool is_partial = false;  // complete, but the result has not come down yet
  };
  using Word = std::uint64_t;

  std::size_t index(std::uint16_t slot, std::uint8_t set) const noexcept {
    return std::size_t{slot} * 2 + set;
  }
  bool is_stale(const Set& set, std::uint32_t tsi, bool any, bool seen) const noexcept;
  bool is_empty(std::size_t at) const noexcept;

  TableShape shape_;
  std::size_t words_;  // of a bitmap
  std::vector<Set> sets_;
  std::vector<Word> bitmaps_;  // of each set: bit r is worker r
  std::vector<std::uint16_t> ports_;
  std::vector<std::int32_t> values_;
};

}  // namespace torchrelay::switchml
