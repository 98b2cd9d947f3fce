#include "torchrelay/switch/udp_switch.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_map>

#include "torchrelay/error.h"

namespace torchrelay::switchml {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMaxControlQueue = 1024;
constexpr std::size_t kMaxControlBytes = 512;
constexpr int kBatchesPerPoll = 16;
constexpr std::size_t kMaxCallers = 8192;
constexpr std::uint64_t kMaxCalls = 256;  // of one address in a second; also in native/bpf

struct Session {
  Session(std::uint64_t session_id, const TableShape& shape)
      : id(session_id),
        table(shape),
        addresses(shape.num_workers),
        workers(shape.num_workers),
        switch_ports(shape.num_workers),
        heard(shape.num_workers, Clock::now()) {
    for (std::uint32_t rank = 0; rank < shape.num_workers; ++rank) workers[rank].rank = rank;
  }

  std::uint64_t id;
  SlotTable table;
  std::vector<std::uint32_t> addresses;  // of the workers; 0: not known yet
  SwitchCounts counts{};
  std::vector<WorkerCounts> workers;
  std::vector<std::uint16_t> switch_ports;  // to which the workers send
  std::vector<Clock::time_point> heard;     // the workers' last packets or signs of life
};

struct Member {
  Session* session;
  std::uint32_t rank;
};

struct Calls {
  Clock::time_point begin;
  std::uint64_t count = 0;
};

std::uint64_t key(const Endpoint& endpoint) { return std::uint64_t{endpoint.ip} << 16 | endpoint.port; }

int bound_socket(const UdpSwitchOptions& options, std::uint16_t port) {
  std::string where = options.address + ":" + std::to_string(port);
  if (port != options.port) where += ", which a switch at " + std::to_string(options.port) + " takes too,";
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  if (inet_pton(AF_INET, options.address.c_str(), &address.sin_addr) != 1)
    throw Error(Code::kArgument, "switch: '" + options.address + "' is not an IPv4 address");
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) throw Error(Code::kUnavailable, with_errno("switch: no UDP socket"));
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    const Error error(Code::kUnavailable, with_errno("switch: UDP " + where + " cannot be bound"));
    ::close(fd);
    throw error;
  }
  prepare_socket(fd);
  return fd;
}

std::uint16_t port_of(int fd) {
  sockaddr_in address{};
  socklen_t size = sizeof address;
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.sin_port);
}

void count(SwitchCounts& counts, Verdict verdict) {
  switch (verdict) {
    case Verdict::kConsumed: break;
    case Verdict::kMulticast: ++counts[kCompleted]; break;
    case Verdict::kUnicast: ++counts[kAnsweredAgain]; break;
    case Verdict::kDuplicate: ++counts[kDuplicates]; break;
    case Verdict::kStale: ++counts[kStale]; break;
    case Verdict::kRejected: ++counts[kRejected]; break;
  }
}

// A socket of the switch.
struct Gate {
  explicit Gate(int socket) : fd(socket), port(port_of(socket)), inbox(socket), outbox(socket, false) {}
  ~Gate() { close(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void close() {
    if (fd >= 0) ::close(fd);
    fd = -1;
  }

  int fd;
  const std::uint16_t port;
  Inbox inbox;
  Outbox outbox;
};

std::vector<std::unique_ptr<Gate>> open_gates(const UdpSwitchOptions& options) {
  std::vector<std::unique_ptr<Gate>> gates;
  const std::uint16_t count = options.port == kUdpPort ? kNumUdpPorts : 1;
  for (std::uint16_t i = 0; i < count; ++i) {
    const auto port = static_cast<std::uint16_t>(options.port + i);
    gates.push_back(std::make_unique<Gate>(bound_socket(options, port)));
  }
  return gates;
}

}  // namespace

struct UdpSwitch::State {
  explicit State(const UdpSwitchOptions& given)
      : options(given),
        gates(open_gates(given)),
        wake(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
        random(given.drop_seed) {}

  ~State() { ::close(wake); }

  void loop() {
    std::vector<pollfd> fds;
    for (const auto& gate : gates) fds.push_back({gate->fd, POLLIN, 0});
    fds.push_back({wake, POLLIN, 0});
    while (!stopping.load()) {
      (void)poll(fds.data(), fds.size(), -1);
      for (std::size_t i = 0; i < gates.size(); ++i) {
        if (fds[i].revents == 0) continue;
        for (int batch = 0; batch < kBatchesPerPoll && !stopping.load() && serve(*gates[i]); ++batch) {
          while (waiting.load() != 0)
            std::this_thread::yield();  // or a busy socket would keep the lock from others
        }
      }
    }
  }

  // Answers one batch; false if there was none.
  bool serve(Gate& gate) {
    const std::lock_guard guard(lock);
    const bool any =
        gate.inbox.receive([&](Bytes datagram, const Endpoint& from) { take(datagram, from, gate); });
    for (const auto& each : gates) each->outbox.flush();
    return any;
  }

  Gate& gate_of(std::uint16_t switch_port) {
    for (const auto& gate : gates)
      if (gate->port == switch_port) return *gate;
    return *gates[0];
  }

  void take(Bytes datagram, const Endpoint& from, Gate& gate) {
    if (const auto request = parse_request(datagram)) {
      ++stats[kControl];
      if (*request == Request::kAlive) {
        if (const Member* member = find(from)) member->session->heard[member->rank] = Clock::now();
        return;
      }
      call(true, {from,
                  gate.port,
                  {datagram.begin(), datagram.begin() + static_cast<std::ptrdiff_t>(
                                                            std::min(datagram.size(), kMaxControlBytes))}});
      return;
    }
    if (chance(options.drop_ingress)) {
      ++stats[kDroppedIngress];
      return;
    }
    const auto header = parse(datagram);
    if (!header) {
      ++stats[kMalformed];
      return;
    }
    const Member* member = find(from);
    if (member == nullptr) {
      ++stats[kStrangers];
      call(false, {from, gate.port, {}});
      return;
    }
    aggregate(*header, datagram.data() + kHeaderBytes, *member, from, gate);
  }

  void aggregate(const Header& header, const std::byte* payload, const Member& member, const Endpoint& from,
                 Gate& gate) {
    Session& session = *member.session;
    session.heard[member.rank] = Clock::now();
    session.switch_ports[member.rank] = gate.port;
    const Verdict verdict = session.table.apply(header, payload, member.rank, from.port);
    count(session.counts, verdict);
    ++session.counts[kReceived];
    WorkerCounts& worker = session.workers[member.rank];
    ++worker.received;
    if (verdict == Verdict::kDuplicate || verdict == Verdict::kUnicast) ++worker.retransmissions;
    if (verdict != Verdict::kMulticast && verdict != Verdict::kUnicast) return;
    session.table.result(header, gate.outbox.allocate(packet_bytes(header.numel)));
    if (verdict == Verdict::kUnicast) {
      answer(session, from, gate);
      return;
    }
    for (std::uint32_t rank = 0; rank < session.addresses.size(); ++rank) {
      const Endpoint to{session.addresses[rank], session.table.port(header, rank)};
      if (session.switch_ports[rank] == gate.port) {
        answer(session, to, gate);
      } else {
        Gate& other = gate_of(session.switch_ports[rank]);
        session.table.result(header, other.outbox.allocate(packet_bytes(header.numel)));
        answer(session, to, other);
      }
    }
  }

  // Sends what the gate's outbox was given last to one more worker.
  void answer(Session& session, const Endpoint& to, Gate& gate) {
    if (chance(options.drop_egress)) {
      ++stats[kDroppedEgress];
      return;
    }
    ++session.counts[kSent];
    gate.outbox.send_to(to);
  }

  bool chance(double probability) {
    return probability > 0 && std::uniform_real_distribution<double>()(random) < probability;
  }

  const Member* find(const Endpoint& from) const {
    auto found = members.find(key(from));
    if (found == members.end()) found = members.find(key({from.ip, 0}));
    return found == members.end() ? nullptr : &found->second;
  }

  // Passes a message to the control plane, but not too many of one address.
  void call(bool is_control, ControlMessage message) {
    const auto now = Clock::now();
    if (callers.size() >= kMaxCallers) callers.clear();
    Calls& calls = callers[std::uint64_t{message.from.ip} << 1 | (is_control ? 1 : 0)];
    if (now - calls.begin > std::chrono::seconds(1)) calls = {now, 0};
    const std::lock_guard guard(queue_lock);
    if (++calls.count > kMaxCalls || queue.size() >= kMaxControlQueue) {
      ++stats[kControlDropped];
      return;
    }
    queue.push_back(std::move(message));
    arrived.notify_one();
  }

  Session& session(std::uint64_t id) {
    const auto found = sessions.find(id);
    if (found == sessions.end())
      throw Error(Code::kArgument, "switch: no session has the id " + std::to_string(id));
    return *found->second;
  }

  void close_session(std::uint64_t id) {
    const auto found = sessions.find(id);
    if (found == sessions.end()) return;
    std::erase_if(members, [&](const auto& entry) { return entry.second.session == found->second.get(); });
    add(stats, found->second->counts);
    sessions.erase(found);
  }

  static void add(SwitchCounts& sum, const SwitchCounts& more) {
    for (std::size_t stat = 0; stat < kNumSessionStats; ++stat) sum[stat] += more[stat];
  }

  // The lock, for all threads but the switch's own.
  std::unique_lock<std::mutex> hold() const {
    waiting.fetch_add(1);
    std::unique_lock guard(lock);
    waiting.fetch_sub(1);
    return guard;
  }

  UdpSwitchOptions options;
  const std::vector<std::unique_ptr<Gate>> gates;  // what they refer to: under the lock
  int wake;
  std::thread thread;

  std::atomic<bool> stopping{false};

  std::mutex queue_lock;  // taken last
  std::condition_variable arrived;
  std::deque<ControlMessage> queue;

  mutable std::atomic<int> waiting{0};  // for the lock
  mutable std::mutex lock;              // of all that follows
  std::mt19937_64 random;
  std::unordered_map<std::uint64_t, std::unique_ptr<Session>> sessions;
  std::unordered_map<std::uint64_t, Member> members;  // by key(); port 0 stands for all
  std::unordered_map<std::uint64_t, Calls> callers;   // by address, and whether it is control
  SwitchCounts stats{};                               // and those of closed sessions
};

UdpSwitch::UdpSwitch(const UdpSwitchOptions& options) : state_(make_process_owned<State>(options)) {
  state_->thread = std::thread([state = state_.get()] { state->loop(); });
}

UdpSwitch::~UdpSwitch() { stop(); }

void UdpSwitch::stop() {
  if (origin_.is_forked() || !state_->thread.joinable()) return;
  state_->stopping.store(true);
  const std::uint64_t one = 1;
  (void)!write(state_->wake, &one, sizeof one);
  state_->thread.join();
  const auto guard = state_->hold();
  for (const auto& gate : state_->gates) gate->close();
}

std::uint16_t UdpSwitch::port() const noexcept { return state_->gates[0]->port; }

void UdpSwitch::open_session(std::uint64_t id, const TableShape& shape) {
  auto session = std::make_unique<Session>(id, shape);
  const auto guard = state_->hold();
  state_->close_session(id);
  state_->sessions[id] = std::move(session);
}

void UdpSwitch::close_session(std::uint64_t id) {
  const auto guard = state_->hold();
  state_->close_session(id);
}

void UdpSwitch::add_worker(std::uint64_t id, std::uint32_t rank, const Endpoint& first,
                           std::uint16_t num_ports) {
  const auto guard = state_->hold();
  Session& session = state_->session(id);
  if (rank >= session.addresses.size())
    throw Error(Code::kArgument, "switch: rank " + std::to_string(rank) + " is not below the session's " +
                                     std::to_string(session.addresses.size()) + " workers");
  if (session.addresses[rank] != 0 && session.addresses[rank] != first.ip)
    throw Error(Code::kArgument,
                "switch: rank " + std::to_string(rank) + " of the session has another address");
  const auto endpoint = [&](int i) {
    return Endpoint{first.ip, static_cast<std::uint16_t>(num_ports == 0 ? 0 : first.port + i)};
  };
  const int ports = std::max<int>(num_ports, 1);
  for (int i = 0; i < ports; ++i) {
    const auto found = state_->members.find(key(endpoint(i)));
    if (found != state_->members.end() && (found->second.session != &session || found->second.rank != rank))
      throw Error(Code::kArgument, "switch: another worker has this address and port");
  }
  for (int i = 0; i < ports; ++i) state_->members[key(endpoint(i))] = {&session, rank};
  session.addresses[rank] = first.ip;
  session.heard[rank] = Clock::now();
}

std::optional<ControlMessage> UdpSwitch::receive_control(std::chrono::milliseconds timeout) {
  std::unique_lock guard(state_->queue_lock);
  if (!state_->arrived.wait_for(guard, timeout, [this] { return !state_->queue.empty(); })) return {};
  ControlMessage message = std::move(state_->queue.front());
  state_->queue.pop_front();
  return message;
}

void UdpSwitch::send_control(Bytes message, const Endpoint& to, std::uint16_t switch_port) {
  const auto guard = state_->hold();
  Gate& gate = state_->gate_of(switch_port);
  if (gate.fd < 0) throw Error(Code::kUnavailable, "switch: it has been stopped and sends no more");
  std::copy(message.begin(), message.end(), gate.outbox.allocate(message.size()));
  gate.outbox.send_to(to);
  gate.outbox.flush();
}

SwitchCounts UdpSwitch::stats() const {
  const auto guard = state_->hold();
  SwitchCounts stats = state_->stats;
  for (const auto& gate : state_->gates) {
    stats[kSocketLost] += gate->inbox.lost();
    stats[kSendLost] += gate->outbox.lost();
  }
  for (const auto& entry : state_->sessions) State::add(stats, entry.second->counts);
  return stats;
}

std::vector<SessionInfo> UdpSwitch::sessions() const {
  const auto guard = state_->hold();
  std::vector<SessionInfo> infos;
  for (const auto& [id, session] : state_->sessions) {
    const auto silent_s = [now = Clock::now()](Clock::time_point heard) {
      return std::chrono::duration<double>(now - heard).count();
    };
    infos.push_back({id, session->table.shape(), session->counts, session->workers});
    for (WorkerCounts& worker : infos.back().workers) worker.silent_s = silent_s(session->heard[worker.rank]);
  }
  std::sort(infos.begin(), infos.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return infos;
}

std::vector<std::uint32_t> UdpSwitch::missing(std::uint64_t id) const {
  const auto guard = state_->hold();
  return state_->session(id).table.missing();
}

}  // namespace torchrelay::switchml
