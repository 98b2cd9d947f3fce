// What messenger.cc (messages) and messenger_connections.cc (their way) share.
#pragma once

#include <sys/epoll.h>

#include <utility>

#include "torchrelay/transport/messenger.h"

namespace torchrelay::transport {

inline constexpr const char* kDied =
    "has died or cannot be reached any more (its connection ended); look at its own output for the cause";
inline constexpr const char* kLeft = "has left the group (destroy_process_group, or its process ended)";

inline constexpr const char* kGarbled = "sent bytes that are no message of this version";

// What precedes the frames of a connection.
struct Greeting {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t reserved;
  std::uint32_t rank;
  SessionToken token;
};
static_assert(sizeof(Greeting) == 28);
inline constexpr std::uint32_t kMagic = 0x41'4c'52'54;  // "TRLA"
inline constexpr std::uint16_t kVersion = 2;

template <class Plain>
std::vector<std::byte> bytes_of(const Plain& value) {
  const auto* data = reinterpret_cast<const std::byte*>(&value);
  return {data, data + sizeof value};
}

// A frame, or a greeting, on its way out. `body` owns bytes, `data` are those of the transfer.
struct Messenger::Outgoing {
  std::vector<std::byte> head;
  std::vector<std::byte> body;
  Block data;
  std::shared_ptr<Transfer> transfer;
  std::size_t sent = 0;  // of head, body and data
};

struct Messenger::Connection {
  enum class State { kConnecting, kStranger, kMember, kReport };

  std::unique_ptr<Stream> stream;
  State state = State::kStranger;
  int rank = -1;
  EventLoop::Id watch = 0, deadline = 0;

  // Reading, with the messenger's lock. The buffer gets headers, and bodies that come with them.
  std::array<std::byte, 512> buffer;
  std::size_t begin = 0, size = 0;
  bool in_body = false;
  Frame frame{};
  std::size_t got = 0;               // of the body
  std::shared_ptr<Transfer> target;  // its data gets the body; null: `aside` does, if it has the size
  std::vector<std::byte> aside;
  bool is_kept = false;  // what `aside` gets

  // Writing, with the peer's lock, or the messenger's for a report.
  std::optional<Outgoing> greeting;
  std::atomic<bool> write_ended{false};

  std::mutex interest;  // in what the event loop watches for
  std::atomic<bool> paused{false}, wants_write{false};
};

struct Messenger::Peer {
  // With the messenger's lock.
  std::vector<ConnectionPtr> connections;
  bool connecting = false;
  bool left = false;
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
    Frame frame;
  };
  std::vector<End> ended;
  std::vector<Local> local;
  std::vector<int> to_flush;
  std::optional<Error> failure;

  void end(std::shared_ptr<Transfer> transfer, std::exception_ptr error = nullptr) {
    ended.push_back({std::move(transfer), std::move(error)});
  }
};

}  // namespace torchrelay::transport
