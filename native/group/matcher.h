// Which receive a message is for. A message goes to the earliest receive that accepts it; a receive takes the
// earliest of the messages that were parked, because none was posted for them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "group/transfer.h"

namespace torchrelay {

// Not thread-safe. A `Frame` describes a message: its tag, size_bytes and code.
template <class Frame>
class Matcher {
 public:
  using Receive = std::shared_ptr<Transfer>;
  struct Parked {
    int source;
    Frame frame;
    std::vector<std::byte> data;
  };

  // Rank `me`, and the ranks as users know them.
  Matcher(int me, std::function<int(int)> name_of) : me_(me), name_of_(std::move(name_of)) {}

  void post(Receive receive) { posted_.push_back(std::move(receive)); }
  void park(Parked message) { parked_.push_back(std::move(message)); }
  const std::deque<Receive>& posted() const noexcept { return posted_; }

  // Removes and returns the receive for a message; null if there is none.
  Receive claim(int source, std::int64_t tag) {
    const auto found =
        std::ranges::find_if(posted_, [&](const Receive& each) { return each->accepts(source, tag); });
    return found == posted_.end() ? nullptr : removed(posted_, found);
  }

  // Removes and returns the message for a receive that is not posted.
  std::optional<Parked> take(const Transfer& receive) {
    const auto found = std::ranges::find_if(
        parked_, [&](const Parked& each) { return receive.accepts(each.source, each.frame.tag); });
    if (found == parked_.end()) return std::nullopt;
    return removed(parked_, found);
  }

  // Whether a receive is posted for a rank, or for any.
  bool awaits(int source) const {
    return std::ranges::any_of(
        posted_, [&](const Receive& each) { return each->peer_ == kAnyRank || each->peer_ == source; });
  }

  // Removes and returns the receives of which `which` is true.
  template <class Which>
  std::vector<Receive> withdraw(Which which) {
    std::vector<Receive> withdrawn;
    std::erase_if(posted_, [&](const Receive& each) {
      if (!which(*each)) return false;
      withdrawn.push_back(each);
      return true;
    });
    return withdrawn;
  }

  // Notes what a receive gets, and returns the error if it is not what it expects.
  std::exception_ptr found(Transfer& receive, int source, const Frame& frame) const {
    receive.found(source, frame.tag, frame.size_bytes);
    return receive.mismatch(name_of_(me_), name_of_(source), frame.code);
  }

  // Copies a message that was parked, if it is what the receive expects.
  std::exception_ptr deliver(Transfer& receive, const Parked& message) const {
    const auto error = found(receive, message.source, message.frame);
    if (!error && !message.data.empty())
      std::memcpy(receive.data_.data, message.data.data(), message.data.size());
    return error;
  }

  // The error of a transfer that did not end in time.
  std::exception_ptr late(const Transfer& transfer) const {
    return transfer.late(name_of_(me_), transfer.peer_ == kAnyRank ? kAnyRank : name_of_(transfer.peer_));
  }

 private:
  template <class Value>
  static Value removed(std::deque<Value>& all, typename std::deque<Value>::iterator at) {
    Value value = std::move(*at);
    all.erase(at);
    return value;
  }

  const int me_;
  const std::function<int(int)> name_of_;
  std::deque<Receive> posted_;
  std::deque<Parked> parked_;
};

}  // namespace torchrelay
