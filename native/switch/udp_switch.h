// An aggregation switch in user space: one UDP socket and one thread.
//
// Sessions are independent of each other: each has its own slots, and its members are known by source address
// and port, so a packet needs no session id. What is no member's data packet changes no slot. Control
// messages, and notes of senders that are no members, wait in a bounded queue for whoever runs the control
// plane.
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/origin.h"
#include "switch/datagrams.h"
#include "switch/state.h"
#include "switch/stats.h"

namespace torchrelay::switchml {

struct UdpSwitchOptions {
  std::string address = "127.0.0.1";
  std::uint16_t port = kUdpPort;  // 0: any free one
  double drop_ingress = 0;        // probabilities, for tests
  double drop_egress = 0;
  std::uint64_t drop_seed = 0;
};

// By SwitchStat. A session has only the first kNumSessionStats.
using SwitchCounts = std::array<std::uint64_t, kNumSwitchStats>;

struct WorkerCounts {
  std::uint32_t rank = 0;
  std::uint64_t received = 0;
  std::uint64_t retransmissions = 0;
  double silent_s = 0;  // since its last packet or sign of life
};

struct SessionInfo {
  std::uint64_t id = 0;
  TableShape shape;
  SwitchCounts counts{};
  std::vector<WorkerCounts> workers;
};

struct ControlMessage {
  Endpoint from;
  std::uint16_t switch_port = 0;  // to which it came
  std::vector<std::byte> bytes;   // empty: a data packet came from a sender that is no member
};

class UdpSwitch {
 public:
  // Binds the sockets and starts: of the port, or of kNumUdpPorts ports at kUdpPort. Throws kUnavailable if
  // the address or port cannot be had.
  explicit UdpSwitch(const UdpSwitchOptions& options);
  ~UdpSwitch();
  UdpSwitch(const UdpSwitch&) = delete;
  UdpSwitch& operator=(const UdpSwitch&) = delete;

  std::uint16_t port() const noexcept;

  // The control plane, for any thread. open_session replaces a session of the same id; all its slots are
  // empty and it has no members. A leaf's session has a socket that is connected to the switch above and has
  // joined there; the session owns it, and ends when that switch does not know it any more. A member's ports
  // start at first_port; 0 ports stand for all of an address. Throws kArgument: no such session or rank, or
  // the address and port are another worker's.
  void open_session(std::uint64_t id, const TableShape& shape, int uplink = -1);
  void close_session(std::uint64_t id);
  void add_worker(std::uint64_t id, std::uint32_t rank, const Endpoint& first, std::uint16_t num_ports);

  // The next control message, or nothing after the timeout.
  std::optional<ControlMessage> receive_control(std::chrono::milliseconds timeout);
  void send_control(Bytes message, const Endpoint& to, std::uint16_t switch_port);

  SwitchCounts stats() const;
  std::vector<SessionInfo> sessions() const;
  // The workers that packets in progress wait for.
  std::vector<std::uint32_t> missing(std::uint64_t id) const;

  // Ends the thread and closes the socket. The statistics stay; send_control throws kUnavailable. In a forked
  // child it does nothing, nor does the destructor.
  void stop();

 private:
  struct State;
  Origin origin_;
  ProcessOwned<State> state_;
};

}  // namespace torchrelay::switchml
