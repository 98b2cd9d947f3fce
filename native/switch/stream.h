// One worker thread's part in the protocol, without sockets and clocks: packets and times in, packets out.
//
// A stream owns a range of slots, its window. Packet i of a job uses index (i + shift) mod 2 * window, whose
// half is the set; shift goes on from job to job, so that each slot's sets always alternate. A packet is sent
// when the packet before it in its slot is done.
//
// int32: packet i carries chunk i. float32: the first B = min(window, N) packets carry the exponents of the
// first B chunks and zeros; packet i + B carries chunk i, quantized with the exponent that the result of
// packet i brought, and the exponent of chunk i + B. So N chunks take N + B packets.
//
// tsi counts the stream's packets over all jobs (modulo 2^32). A result that is not of a packet in flight
// (its job, tsi, slot, set and size) is discarded.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "switch/wire.h"

namespace torchrelay::switchml {

using Microseconds = std::chrono::microseconds;

// Each packet in flight has a timer. After `threshold` timeouts in a row, with no answer to a packet that was
// sent once, the timeout doubles and the threshold grows by `increment`; it halves again when answers take
// less than half of it. While answers take longer than half the timeout, it is twice what they take, at most
// 8 times `timeout`.
//
// A loss is mostly noticed earlier: packets are answered in the order in which they were sent, so one that
// was overtaken by an eighth of the window is sent again, once, without waiting for its timer.
struct RetryPolicy {
  Microseconds timeout{10'000};
  std::uint32_t threshold = 100;
  std::uint32_t increment = 100;
};

struct StreamShape {
  std::uint16_t first_slot = 0;
  std::uint16_t window = 1;  // slots
  std::uint16_t numel = kMaxNumel;
  std::uint32_t num_workers = 1;
  RetryPolicy retry;
};

// Packets of one size, one after another in memory.
class PacketQueue {
 public:
  explicit PacketQueue(std::size_t packet_bytes) : packet_bytes_(packet_bytes) {}

  std::byte* append() {
    bytes_.resize(bytes_.size() + packet_bytes_);
    return bytes_.data() + bytes_.size() - packet_bytes_;
  }
  std::size_t packet_bytes() const noexcept { return packet_bytes_; }
  std::size_t size() const noexcept { return bytes_.size() / packet_bytes_; }
  Bytes bytes() const noexcept { return bytes_; }
  void clear() noexcept { bytes_.clear(); }

 private:
  std::size_t packet_bytes_;
  std::vector<std::byte> bytes_;
};

struct StreamStats {
  std::uint64_t sent = 0;  // packets, retransmissions included
  std::uint64_t results = 0;
  std::uint64_t retransmissions = 0;
  std::uint64_t discarded = 0;  // results of no packet in flight
};

class Stream {
 public:
  explicit Stream(const StreamShape& shape);

  // Starts to sum `count` values in place. The memory is the stream's until done().
  void begin(std::int32_t* values, std::size_t count, std::uint8_t job, PacketQueue& out, Microseconds now);
  void begin(float* values, std::size_t count, std::uint8_t job, PacketQueue& out, Microseconds now);

  // Takes one datagram; appends what is to be sent now.
  void receive(Bytes datagram, PacketQueue& out, Microseconds now);

  // Appends what is to be sent again; to be called at next_deadline().
  void tick(PacketQueue& out, Microseconds now);

  bool done() const noexcept { return num_done_ == packets_.size(); }
  Microseconds next_deadline() const noexcept { return next_deadline_; }
  std::size_t num_done() const noexcept { return num_done_; }
  std::size_t num_packets() const noexcept { return packets_.size(); }

  // The chunks that could not be quantized, and were left as they are. Equal on all workers when done().
  const std::vector<std::size_t>& exact_chunks() const noexcept { return exact_chunks_; }

  const StreamShape& shape() const noexcept { return shape_; }
  const StreamStats& stats() const noexcept { return stats_; }

 private:
  enum class State : std::uint8_t { kWaiting, kInFlight, kDone };
  struct Slot {
    std::size_t packet = 0;
    Microseconds sent{0};
    Microseconds deadline{0};
    std::uint64_t order = 0;  // among the packets sent once
    bool in_flight = false;
    bool again = false;  // sent more than once
  };

  struct Sent {
    std::size_t packet = 0;
    std::uint64_t order = 0;
  };

  void begin(std::size_t count, std::size_t delay, std::uint8_t job, PacketQueue& out, Microseconds now);
  std::size_t place(std::size_t packet) const noexcept { return (packet + shift_) % (2 * shape_.window); }
  std::size_t chunk_size(std::size_t chunk) const noexcept;
  Header header_of(std::size_t packet) const noexcept;
  void send(std::size_t packet, PacketQueue& out, Microseconds now);
  void send_if_due(std::size_t packet, PacketQueue& out, Microseconds now);
  void write_payload(std::size_t packet, std::byte* payload) const;
  void take_result(std::size_t packet, const Header& header, const std::byte* payload);
  void measure(Microseconds round_trip) noexcept;
  void resend_overtaken(std::uint64_t by, PacketQueue& out, Microseconds now);
  Microseconds timeout() const noexcept;
  void count_timeout() noexcept;

  StreamShape shape_;
  std::size_t shift_ = 0;
  std::uint32_t next_tsi_ = 0;
  std::vector<Slot> slots_;
  StreamStats stats_;

  // The job.
  std::int32_t* integers_ = nullptr;  // one of the two
  float* floats_ = nullptr;
  std::size_t count_ = 0;
  std::size_t chunks_ = 0;
  std::size_t batch_ = 0;  // B
  std::size_t delay_ = 0;  // packet i carries chunk i - delay
  std::uint8_t job_ = 0;
  std::size_t num_done_ = 0;
  std::vector<State> packets_;
  std::vector<std::int8_t> exponents_;  // the workers' largest, by chunk
  std::vector<std::size_t> exact_chunks_;

  // Timers.
  std::deque<Sent> sent_;  // in order, without those that were overtaken
  std::uint64_t next_order_ = 0;
  Microseconds base_timeout_{0};
  Microseconds round_trip_{0};  // smoothed
  std::uint32_t timeouts_ = 0;
  std::uint32_t threshold_ = 0;
  Microseconds next_deadline_ = Microseconds::max();
};

}  // namespace torchrelay::switchml
