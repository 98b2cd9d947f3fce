// What messenger.cc (messages) and messenger_connections.cc (their way) share.
#pragma once

#include <sys/epoll.h>

#include <utility>

#include "group/messenger.h"

namespace torchrelay {

inline constexpr const char* kDied =
    "has died or cannot be reached any more (its connection ended); look at its own output for the cause";
inline constexpr const char* kLeft = "has left the group (destroy_process_group, or its process ended)";

inline constexpr auto kAll = [](const Transfer&) { return true; };

inline constexpr std::size_t kBufferBytes = 512;
inline constexpr const char* kGarbled = "sent bytes that are no message of this version";

// A frame on its way out. `body` owns bytes, `data` are those of the transfer.
struct Messenger::Outgoing {
  net::Frame frame;
  std::vector<std::byte> body;
  Block data;
  std::shared_ptr<Transfer> transfer;
  std::size_t sent = 0;  // of all three
};

struct Messenger::Connection {
  enum class State { kConnecting, kMember, kReport };

  std::unique_ptr<net::Stream> stream;
  State state = State::kMember;
  int rank = -1;
  net::EventLoop::Id watch = 0, deadline = 0;
  bool is_connected = false;  // only of one that this end makes; it may still negotiate

  // Reading, with the messenger's lock.
  net::FrameReader reader{kBufferBytes};
  std::shared_ptr<Transfer> target;  // its data gets the body; null: `scratch` does, if it has the size
  std::vector<std::byte> scratch;
  bool is_kept = false;  // what `scratch` gets

  // Writing, with the peer's lock, or the messenger's for a report.
  bool greets = false;          // this end made it
  std::size_t greeted = 0;      // bytes of the greeting, and of what belongs to it
  std::vector<std::byte> body;  // of a report
  bool has_frames = false;      // some may be lost if it ends
  std::atomic<bool> write_ended{false};

  std::mutex interest;  // in what the event loop watches for
  std::atomic<bool> paused{false}, wants_write{false};
};

struct Messenger::Peer {
  // With the messenger's lock.
  std::vector<ConnectionPtr> connections;
  bool connecting = false;
  bool left = false;
  std::string why_ended;  // why its first connection ended; empty while none has
  std::string why_gone;
  std::size_t parked_bytes = 0;

  std::mutex lock;  // of what follows
  std::condition_variable idle;
  ConnectionPtr out;
  std::deque<Outgoing> queue;
  std::atomic<bool> gone{false};
};

// What follows from what happened with the lock, to be done without it.
struct Messenger::Consequences {
  struct End {
    std::shared_ptr<Transfer> transfer;
    std::exception_ptr error;
  };
  struct Local {
    std::shared_ptr<Transfer> transfer;
    int source;
    net::Frame frame;
  };
  std::vector<End> ended;
  std::vector<Local> local;
  std::vector<int> to_flush;
  std::optional<Error> failure;

  void end(std::shared_ptr<Transfer> transfer, std::exception_ptr error = nullptr) {
    ended.push_back({std::move(transfer), std::move(error)});
  }
};

}  // namespace torchrelay
