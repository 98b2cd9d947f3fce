// Exactly-once, in-order delivery over an Endpoint that may delay, reorder and duplicate.
//
// Messages between two endpoints are numbered; the receiver keeps those that came early, drops those it has
// seen, and drops and counts messages of other protocols. A lost message is not sent again (the
// transport below is TCP): it shows as a gap, reported by stuck_peer().
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>

#include "parameters/wire.h"

namespace torchrelay::parameters {

class ReliableEndpoint {
 public:
  // `id` is this endpoint's, `incarnation` larger than that of any earlier user of the id.
  ReliableEndpoint(std::unique_ptr<Endpoint> endpoint, std::uint32_t id, std::uint32_t incarnation);

  std::string address() const { return endpoint_->address(); }
  std::uint32_t id() const { return id_; }

  // Makes `peer` known; the first message to it contains our address.
  void connect(std::uint32_t peer, const std::string& address);
  bool knows(std::uint32_t peer) const { return peers_.contains(peer); }
  // Whether messages to `peer` reach the process of this incarnation, not one before or after it.
  bool has_met(std::uint32_t peer, std::uint32_t incarnation) const;
  // Sends a peer our address before any other message.
  void greet(std::uint32_t peer);

  // Fills the header in front of the message's body and sends it.
  void send(std::uint32_t peer, Kind kind, std::uint32_t count, Message message);

  // The next message in order; false after `timeout`. Handles hellos itself.
  bool receive(Header& header, Message& message, std::chrono::microseconds timeout);

  // A peer whose next message has been missing for longer than `timeout` though later ones came; -1: none.
  std::int64_t stuck_peer(std::chrono::milliseconds timeout) const;
  // See Endpoint::is_refused.
  bool is_refused(std::uint32_t peer) const { return endpoint_->is_refused(peer); }
  // Starts the time of missing messages anew: this process was stopped.
  void forgive_gaps();

  // To and from other nodes.
  std::uint64_t sent_bytes = 0, received_bytes = 0, sent_messages = 0, received_messages = 0;
  std::uint64_t duplicates = 0, protocol_errors = 0;

 private:
  struct Outgoing {
    std::uint32_t next = 0;
    bool greeted = false;
  };
  struct Incoming {
    std::uint32_t incarnation = 0;
    std::uint32_t next = 0;
    std::map<std::uint32_t, Message> early;
    std::chrono::steady_clock::time_point early_since;
  };
  void send_numbered(std::uint32_t peer, Outgoing& outgoing, Kind kind, std::uint32_t count, Message message);
  void sort_in(const Message& message);
  void accept(const Header& header, const Message& message);
  bool valid(const Message& message, Header& header);

  std::unique_ptr<Endpoint> endpoint_;
  std::uint32_t id_;
  std::uint32_t incarnation_;
  std::unordered_map<std::uint32_t, Outgoing> peers_;
  std::unordered_map<std::uint32_t, Incoming> incoming_;
  std::deque<Message> ready_;
};

}  // namespace torchrelay::parameters
