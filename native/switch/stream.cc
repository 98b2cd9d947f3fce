#include "switch/stream.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "switch/kernels.h"
#include "switch/quantizer.h"

namespace torchrelay::switchml {
namespace {

constexpr Microseconds kLongestTimeout{1'000'000};
constexpr int kLongestRoundTrip = 8;  // times the configured timeout: what a round trip may make of it
constexpr std::uint64_t kLeastOvertaking = 3;  // packets; fewer may just have been reordered

}  // namespace

Stream::Stream(const StreamShape& shape) : shape_(shape), slots_(shape.window) {
  if (shape.window == 0 || shape.first_slot + shape.window > kMaxSlots || shape.num_workers == 0 ||
      !is_packet_numel(shape.numel) || shape.retry.timeout <= Microseconds{0})
    throw Error(Code::kArgument,
                "switch: a stream needs at least 1 worker, 1 to 8192 slots, a timeout above 0");
}

void Stream::begin(std::int32_t* values, std::size_t count, std::uint8_t job, PacketQueue& out,
                   Microseconds now) {
  integers_ = values;
  floats_ = nullptr;
  begin(count, 0, job, out, now);
}

void Stream::begin(float* values, std::size_t count, std::uint8_t job, PacketQueue& out, Microseconds now) {
  integers_ = nullptr;
  floats_ = values;
  const std::size_t chunks = (count + shape_.numel - 1) / shape_.numel;
  begin(count, std::min<std::size_t>(shape_.window, chunks), job, out, now);
}

void Stream::begin(std::size_t count, std::size_t delay, std::uint8_t job, PacketQueue& out,
                   Microseconds now) {
  shift_ = (shift_ + packets_.size()) % (2 * shape_.window);
  next_tsi_ += static_cast<std::uint32_t>(packets_.size());
  count_ = count;
  chunks_ = (count + shape_.numel - 1) / shape_.numel;
  batch_ = std::min<std::size_t>(shape_.window, chunks_);
  delay_ = delay;
  job_ = job;
  num_done_ = 0;
  packets_.assign(chunks_ + delay, State::kWaiting);
  exponents_.assign(floats_ != nullptr ? chunks_ : 0, kSmallestExponent);
  exact_chunks_.clear();
  sent_.clear();
  base_timeout_ = shape_.retry.timeout;
  timeouts_ = 0;
  threshold_ = shape_.retry.threshold;
  next_deadline_ = Microseconds::max();
  for (std::size_t packet = 0; packet < batch_; ++packet) send(packet, out, now);
}

std::size_t Stream::chunk_size(std::size_t chunk) const noexcept {
  return std::min<std::size_t>(shape_.numel, count_ - chunk * shape_.numel);
}

Header Stream::header_of(std::size_t packet) const noexcept {
  const std::size_t at = place(packet);
  Header header;
  header.job = job_;
  header.tsi = next_tsi_ + static_cast<std::uint32_t>(packet);
  header.slot = static_cast<std::uint16_t>(shape_.first_slot + at % shape_.window);
  header.set = at >= shape_.window;
  header.numel = shape_.numel;
  header.exponent = kSmallestExponent;
  return header;
}

void Stream::send(std::size_t packet, PacketQueue& out, Microseconds now) {
  Header header = header_of(packet);
  if (floats_ != nullptr && packet < chunks_)
    header.exponent = block_exponent(floats_ + packet * shape_.numel, chunk_size(packet));
  std::byte* data = out.append();
  serialize(header, data);
  write_payload(packet, data + kHeaderBytes);

  Slot& slot = slots_[place(packet) % shape_.window];
  slot.again = packets_[packet] == State::kInFlight;
  if (!slot.again) {
    slot.order = next_order_++;
    sent_.push_back({packet, slot.order});
  }
  slot.in_flight = true;
  slot.packet = packet;
  slot.sent = now;
  slot.deadline = now + timeout();
  packets_[packet] = State::kInFlight;
  next_deadline_ = std::min(next_deadline_, slot.deadline);
  ++stats_.sent;
}

void Stream::write_payload(std::size_t packet, std::byte* payload) const {
  std::size_t written = 0;
  if (packet >= delay_) {
    const std::size_t chunk = packet - delay_;
    const std::size_t first = chunk * shape_.numel;
    if (integers_ != nullptr) {
      written = chunk_size(chunk);
      kernels().store(payload, integers_ + first, written);
    } else if (exponents_[chunk] != kNotQuantizable) {
      written = chunk_size(chunk);
      kernels().quantize(payload, floats_ + first, written,
                         quantization_scale(exponents_[chunk], shape_.num_workers));
    }
  }
  std::memset(payload + written * sizeof(std::int32_t), 0, (shape_.numel - written) * sizeof(std::int32_t));
}

void Stream::receive(Bytes datagram, PacketQueue& out, Microseconds now) {
  const auto header = parse(datagram);
  const std::uint32_t packet32 = header ? header->tsi - next_tsi_ : 0;
  const std::size_t packet = packet32;
  if (!header || packet >= packets_.size() || packets_[packet] != State::kInFlight) {
    ++stats_.discarded;
    return;
  }
  const Header expected = header_of(packet);
  if (header->job != expected.job || header->slot != expected.slot || header->set != expected.set ||
      header->numel != expected.numel) {
    ++stats_.discarded;
    return;
  }
  Slot& slot = slots_[place(packet) % shape_.window];
  slot.in_flight = false;
  packets_[packet] = State::kDone;
  if (!slot.again) {  // else the answer may be to either: Karn's rule
    measure(now - slot.sent);
    resend_overtaken(slot.order, out, now);
  }
  ++num_done_;
  ++stats_.results;
  take_result(packet, *header, datagram.data() + kHeaderBytes);
  send_if_due(packet + batch_, out, now);
  if (batch_ != shape_.window) send_if_due(packet + shape_.window, out, now);
}

// A packet waits for the exponent that the packet `batch_` before it brings, and for its slot.
void Stream::send_if_due(std::size_t packet, PacketQueue& out, Microseconds now) {
  if (packet >= packets_.size() || packets_[packet] != State::kWaiting) return;
  const auto done = [&](std::size_t before) {
    return packet < before || packets_[packet - before] == State::kDone;
  };
  if (done(batch_) && done(shape_.window)) send(packet, out, now);
}

void Stream::take_result(std::size_t packet, const Header& header, const std::byte* payload) {
  if (floats_ != nullptr && packet < chunks_) exponents_[packet] = header.exponent;
  if (packet < delay_) return;
  const std::size_t chunk = packet - delay_;
  const std::size_t first = chunk * shape_.numel;
  if (integers_ != nullptr) {
    kernels().load(integers_ + first, payload, chunk_size(chunk));
  } else if (exponents_[chunk] == kNotQuantizable) {
    exact_chunks_.push_back(chunk);
  } else {
    kernels().dequantize(floats_ + first, payload, chunk_size(chunk),
                         1.0 / quantization_scale(exponents_[chunk], shape_.num_workers));
  }
}

void Stream::tick(PacketQueue& out, Microseconds now) {
  if (now < next_deadline_) return;
  next_deadline_ = Microseconds::max();
  for (Slot& slot : slots_) {
    if (!slot.in_flight) continue;
    if (slot.deadline <= now) {
      count_timeout();
      ++stats_.retransmissions;
      send(slot.packet, out, now);
    } else {
      next_deadline_ = std::min(next_deadline_, slot.deadline);
    }
  }
}

void Stream::measure(Microseconds round_trip) noexcept {
  if (round_trip_ == Microseconds{0}) round_trip_ = round_trip;
  round_trip_ += (round_trip - round_trip_) / 8;
  timeouts_ = 0;
  if (2 * round_trip < base_timeout_) base_timeout_ = std::max(base_timeout_ / 2, shape_.retry.timeout);
}

void Stream::resend_overtaken(std::uint64_t by, PacketQueue& out, Microseconds now) {
  const std::uint64_t overtaking = std::max<std::uint64_t>(shape_.window / 8, kLeastOvertaking);
  while (!sent_.empty() && sent_.front().order + overtaking <= by) {
    const std::size_t packet = sent_.front().packet;
    sent_.pop_front();
    if (packets_[packet] != State::kInFlight || slots_[place(packet) % shape_.window].again) continue;
    ++stats_.retransmissions;
    send(packet, out, now);
  }
}

Microseconds Stream::timeout() const noexcept {
  return std::max(base_timeout_, std::min(2 * round_trip_, kLongestRoundTrip * shape_.retry.timeout));
}

void Stream::count_timeout() noexcept {
  if (++timeouts_ < threshold_) return;
  base_timeout_ = std::min(2 * base_timeout_, std::max(kLongestTimeout, shape_.retry.timeout));
  threshold_ += shape_.retry.increment;
  timeouts_ = 0;
}

}  // namespace torchrelay::switchml
