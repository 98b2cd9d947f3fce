// The part of a worker that asks owners on other nodes, and takes in what they answer.
#include <algorithm>
#include <unordered_set>

#include "core/error.h"
#include "parameters/locked_entry.h"
#include "parameters/worker.h"

namespace torchrelay::parameters {
namespace {

// A large request goes in parts, so that one is served while the answer to another is on its way.
constexpr std::size_t kKeysPerRequest = 2048;
constexpr std::size_t kBytesPerRequest = std::size_t{4} << 20;  // of the values sent or asked for

}  // namespace

// Of a set's keys that were missed, keeps the last occurrence of each, and none that a later occurrence in
// the batch has already written here.
void Worker::drop_overwritten(const std::int64_t* keys, std::size_t count) {
  std::unordered_set<std::int64_t> seen;
  std::vector<Missed> kept;
  auto missed = missed_.rbegin();
  for (std::size_t i = count; i-- > 0;) {
    const bool last = seen.insert(keys[i]).second;
    if (missed == missed_.rend() || missed->index != i) continue;
    if (last) kept.push_back(*missed);
    ++missed;
  }
  missed_.assign(kept.rbegin(), kept.rend());
}

std::int64_t Worker::ask_owners(Op op, const std::int64_t* keys, std::size_t count, std::byte* values,
                                std::shared_ptr<void> holder) {
  if (sets(op)) drop_overwritten(keys, count);
  if (missed_.empty()) return -1;
  const std::int64_t request_id = next_request_id_++;
  Pending& pending = pending_[request_id];
  pending.op = op;
  pending.remaining = missed_.size();
  pending.holder = std::move(holder);
  num_others_ += class_of(op) == UnfinishedKeys::Class::kOther ? 1 : 0;
  pending.keys.reserve(missed_.size());
  pending.epochs.reserve(missed_.size());
  pending.places.reserve(missed_.size());
  for (auto& positions : by_destination_) positions.clear();
  const SlabHeader& header = store_->header();
  std::byte* place = values;
  std::size_t at = 0;
  for (std::uint32_t position = 0; position < missed_.size(); ++position) {
    const Missed& missed = missed_[position];
    const std::int64_t key = keys[missed.index];
    if (header.num_classes == 1) {
      place = values + missed.index * store_->value_bytes(op, key);
    } else {
      for (; at < missed.index; ++at) place += store_->value_bytes(op, keys[at]);
    }
    pending.keys.push_back(key);
    pending.places.push_back(place);
    pending.epochs.push_back(missed.epoch);
    by_destination_[missed.owner * header.num_channels + store_->header().channel_of(key)].push_back(
        position);
  }
  // An answer is as large as what was asked for; a part may exceed this by one row.
  const std::size_t most_bytes = std::min(kBytesPerRequest, options_.max_message_bytes / 2);
  for (std::uint32_t d = 0; d < by_destination_.size(); ++d) {
    std::span<const std::uint32_t> positions = by_destination_[d];
    while (!positions.empty()) {
      std::size_t part = 0, value_bytes = 0;
      do value_bytes += store_->value_bytes(op, pending.keys[positions[part++]]);
      while (part < std::min(kKeysPerRequest, positions.size()) && value_bytes < most_bytes);
      send_request(request_id, pending, d, positions.first(part), reads(op) ? 0 : value_bytes);
      positions = positions.subspan(part);
    }
  }
  store_->count(user_id_,
                reads(op)         ? kRemotePulls
                : op == Op::kPush ? kRemotePushes
                                  : kRemoteSets,
                missed_.size());
  return request_id;
}

void Worker::send_request(std::int64_t request_id, const Pending& pending, std::uint32_t destination,
                          std::span<const std::uint32_t> positions, std::size_t value_bytes) {
  const std::size_t count = positions.size();
  Writer writer(sizeof(RequestHead) + count * 8 + 2 * padded(count * 4) + value_bytes);
  writer.put(RequestHead{first_wire_id_ + static_cast<std::uint64_t>(request_id), endpoint_->id(),
                         static_cast<std::uint32_t>(pending.op)});
  auto* keys = writer.array<std::int64_t>(count);
  auto* epochs = reinterpret_cast<std::uint32_t*>(writer.skip(padded(count * 4)));
  auto* places = reinterpret_cast<std::uint32_t*>(writer.skip(padded(count * 4)));
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t p = positions[i];
    keys[i] = pending.keys[p];
    epochs[i] = pending.epochs[p];
    places[i] = p;
    if (!reads(pending.op))
      writer.put_bytes(pending.places[p], store_->value_bytes(pending.op, pending.keys[p]));
  }
  const std::uint32_t channels = store_->header().num_channels;
  endpoint_->send(channel_endpoint(destination / channels, destination % channels), Kind::kRequest,
                  static_cast<std::uint32_t>(count), writer.finish());
}

// A replica here that is being given up may lack what the answer tells: its owner may know of it no longer.
bool Worker::is_early(const Pending& pending, const std::uint32_t* positions, std::size_t count) const {
  bool early = false;
  for (std::size_t i = 0; i < count; ++i) {
    if (positions[i] >= pending.keys.size())
      throw Error(Code::kProtocol, "parameters: a reply names a key that was not asked for");
    const std::int64_t entry_index = store_->index().find(pending.keys[positions[i]]);
    early |= entry_index >= 0 && store_->entry(entry_index).has(kLeaving);
  }
  return early;
}

bool Worker::take_early_answers() {
  std::vector<Answer> waiting;
  waiting.swap(early_);
  for (const Answer& answer : waiting) take_answer(answer);
  return early_.size() < waiting.size();
}

void Worker::take_answer(const Answer& answer) {
  const Message& message = answer.message;
  const std::size_t count = answer.count;
  Reader reader(message.data() + sizeof(Header), message.size_bytes() - sizeof(Header));
  const auto head = reader.take<ReplyHead>();
  if (incarnation_of(head.request_id) != incarnation_of(first_wire_id_))
    return;  // meant for a dead predecessor
  const auto found = pending_.find(static_cast<std::int64_t>(head.request_id - first_wire_id_));
  if (found == pending_.end() || head.served > std::min(count, found->second.remaining))
    throw Error(Code::kProtocol, "parameters: a reply to no pending request");
  Pending& pending = found->second;
  const auto* positions = reinterpret_cast<const std::uint32_t*>(reader.take_bytes(padded(count * 4)));
  const auto* epochs = reinterpret_cast<const std::uint32_t*>(reader.take_bytes(padded(count * 4)));
  if (is_early(pending, positions, head.served)) return early_.push_back(answer);
  for (std::uint32_t i = 0; i < head.served; ++i) {
    const std::uint32_t p = positions[i];
    const std::int64_t key = pending.keys[p];
    if (reads(pending.op)) {
      const std::size_t size = store_->value_bytes(pending.op, key);
      const std::byte* value = reader.take_bytes(size);
      if (!pending.places.empty()) std::memcpy(pending.places[p], value, size);
    }
    if (epochs[i] > pending.epochs[p]) learn(key, head.owner, epochs[i]);
  }
  pending.remaining -= head.served;
  if (pending.remaining == 0) finish(found->first);
}

// Feeds the location cache.
void Worker::learn(std::int64_t key, std::uint32_t owner, std::uint32_t epoch) {
  const std::int64_t entry_index = store_->index().find(key);
  if (entry_index < 0 || store_->ownership_epoch(entry_index) >= epoch) return;
  LockedEntry entry(*store_, entry_index, user_id_);
  if (entry.key() != key || entry->state != State::kAbsent || entry.epoch() >= epoch) return;
  entry.set_owner(owner, epoch);
}

}  // namespace torchrelay::parameters
