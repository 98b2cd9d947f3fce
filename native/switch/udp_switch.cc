#include "switch/udp_switch.h"

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

#include "core/error.h"

namespace torchrelay::switchml {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMaxControlQueue = 1024;
constexpr std::size_t kMaxControlBytes = 512;
constexpr int kBatchesPerPoll = 16;
constexpr int kBetweenSignsMs = 1000;  // of life, to the switch above
constexpr std::size_t kMaxCallers = 8192;
constexpr std::uint64_t kMaxCalls = 256;  // of one address in a second; also in native/bpf

Endpoint endpoint_of(int fd, decltype(getsockname)* which) {
  sockaddr_in address{};
  socklen_t size = sizeof address;
  which(fd, reinterpret_cast<sockaddr*>(&address), &size);
  return {ntohl(address.sin_addr.s_addr), ntohs(address.sin_port)};
}

// A socket of the switch: one of its ports, or connected to the switch above it for one session.
struct Gate {
  explicit Gate(int socket)
      : fd(socket), port(endpoint_of(socket, getsockname).port), inbox(socket), outbox(socket, false) {}
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

struct Uplink {
  Uplink(std::uint64_t session, int socket)
      : session_id(session), gate(socket), above(endpoint_of(socket, getpeername)) {}

  const std::uint64_t session_id;
  Gate gate;
  const Endpoint above;
};

struct Session {
  Session(std::uint64_t session_id, const TableShape& shape, std::shared_ptr<Uplink> to_switch_above)
      : id(session_id),
        uplink(std::move(to_switch_above)),
        table(shape),
        addresses(shape.num_workers),
        workers(shape.num_workers),
        switch_ports(shape.num_workers),
        heard(shape.num_workers, Clock::now()) {
    for (std::uint32_t rank = 0; rank < shape.num_workers; ++rank) workers[rank].rank = rank;
  }

  std::uint64_t id;
  std::shared_ptr<Uplink> uplink;  // of a leaf
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

void count(SwitchCounts& counts, Verdict verdict) {
  switch (verdict) {
    case Verdict::kConsumed: break;
    case Verdict::kMulticast: ++counts[kCompleted]; break;
    case Verdict::kForward: ++counts[kForwarded]; break;
    case Verdict::kUnicast: ++counts[kAnsweredAgain]; break;
    case Verdict::kDuplicate: ++counts[kDuplicates]; break;
    case Verdict::kStale: ++counts[kStale]; break;
    case Verdict::kRejected: ++counts[kRejected]; break;
  }
}

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
    std::vector<std::shared_ptr<Uplink>> uplinks;
    for (Clock::time_point next_sign{}; !stopping.load();) {
      if (uplinks_changed.exchange(false)) {
        fds.assign({{wake, POLLIN, 0}});
        for (const auto& gate : gates) fds.push_back({gate->fd, POLLIN, 0});
        uplinks = current_uplinks();
        for (const auto& uplink : uplinks) fds.push_back({uplink->gate.fd, POLLIN, 0});
      }
      (void)poll(fds.data(), fds.size(), uplinks.empty() ? -1 : kBetweenSignsMs);
      std::uint64_t woken = 0;
      if (fds[0].revents != 0) (void)!read(wake, &woken, sizeof woken);
      for (std::size_t i = 1; i < fds.size(); ++i) {
        if (fds[i].revents == 0) continue;
        const auto serve_one = [&] {
          return i <= gates.size() ? serve(*gates[i - 1]) : serve(*uplinks[i - 1 - gates.size()]);
        };
        for (int batch = 0; batch < kBatchesPerPoll && !stopping.load() && serve_one(); ++batch) {
          while (waiting.load() != 0)
            std::this_thread::yield();  // or a busy socket would keep the lock from others
        }
      }
      if (const auto now = Clock::now(); !uplinks.empty() && now >= next_sign) {
        for (const auto& uplink : uplinks) send_sign_of_life(*uplink);
        next_sign = now + std::chrono::milliseconds(kBetweenSignsMs);
      }
    }
  }

  void wake_up() {
    const std::uint64_t one = 1;
    (void)!write(wake, &one, sizeof one);
  }

  std::vector<std::shared_ptr<Uplink>> current_uplinks() {
    const std::lock_guard guard(lock);
    std::vector<std::shared_ptr<Uplink>> found;
    for (const auto& entry : sessions)
      if (entry.second->uplink) found.push_back(entry.second->uplink);
    return found;
  }

  // The switch above ends a session whose workers are all silent.
  void send_sign_of_life(Uplink& uplink) {
    const std::lock_guard guard(lock);
    write_alive(uplink.gate.outbox.allocate(kAliveBytes));
    uplink.gate.outbox.send_to(uplink.above);
    uplink.gate.outbox.flush();
  }

  // Answers one batch; false if there was none.
  bool serve(Gate& gate) {
    const std::lock_guard guard(lock);
    const bool any =
        gate.inbox.receive([&](Bytes datagram, const Endpoint& from) { take(datagram, from, gate); });
    flush();
    return any;
  }

  // Takes a batch of results; false if there was none.
  bool serve(Uplink& uplink) {
    const std::lock_guard guard(lock);
    const auto found = sessions.find(uplink.session_id);
    if (found == sessions.end() || found->second->uplink.get() != &uplink) return false;
    Session& session = *found->second;
    bool is_lost = false;
    const bool any = uplink.gate.inbox.receive([&](Bytes datagram, const Endpoint&) {
      const auto notice = parse_notice(datagram);
      is_lost = is_lost || notice == kUnknownSession;
      if (notice == kCoalesced) uplink.gate.outbox.set_segmentation(false);
      const auto header = parse(datagram);
      if (!header || !session.table.accept(*header, datagram.data() + kHeaderBytes)) return;
      ++session.counts[kCompleted];
      multicast(session, *header);
    });
    flush();
    if (is_lost || uplink.gate.inbox.refused() || uplink.gate.outbox.refused()) close_session(session.id);
    return any;
  }

  void flush() {
    for (const auto& gate : gates) gate->outbox.flush();
    for (Outbox* outbox : forwarding) outbox->flush();
    forwarding.clear();
  }

  Gate& gate_of(std::uint16_t switch_port) {
    for (const auto& gate : gates)
      if (gate->port == switch_port) return *gate;
    return *gates[0];
  }

  void take(Bytes datagram, const Endpoint& from, Gate& gate) {
    if (const auto request = parse_request(datagram)) {
      ++stats[kControl];
      if (*request == kAlive) {
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
    if (verdict == Verdict::kMulticast) multicast(session, header);
    if (verdict == Verdict::kForward) {
      Outbox& outbox = session.uplink->gate.outbox;
      session.table.result(header, outbox.allocate(packet_bytes(header.numel)));
      outbox.send_to(session.uplink->above);
      if (forwarding.empty() || forwarding.back() != &outbox) forwarding.push_back(&outbox);
    }
    if (verdict == Verdict::kUnicast) {
      session.table.result(header, gate.outbox.allocate(packet_bytes(header.numel)));
      answer(session, from, gate);
    }
  }

  void multicast(Session& session, const Header& header) {
    const Gate* last = nullptr;
    for (std::uint32_t rank = 0; rank < session.addresses.size(); ++rank) {
      Gate& gate = gate_of(session.switch_ports[rank]);
      if (&gate != last) session.table.result(header, gate.outbox.allocate(packet_bytes(header.numel)));
      last = &gate;
      answer(session, {session.addresses[rank], session.table.port(header, rank)}, gate);
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
    if (found->second->uplink) uplinks_changed.store(true);
    sessions.erase(found);
    wake_up();
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
  std::vector<Outbox*> forwarding;  // to switches above, in the batch in progress; under the lock
  int wake;
  std::thread thread;

  std::atomic<bool> stopping{false};
  std::atomic<bool> uplinks_changed{true};

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
  state_->thread = start_thread([state = state_.get()] { state->loop(); });
}

UdpSwitch::~UdpSwitch() { stop(); }

void UdpSwitch::stop() {
  if (origin_.is_forked() || !state_->thread.joinable()) return;
  state_->stopping.store(true);
  state_->wake_up();
  state_->thread.join();
  const auto guard = state_->hold();
  for (const auto& gate : state_->gates) gate->close();
  for (const auto& entry : state_->sessions)
    if (entry.second->uplink) entry.second->uplink->gate.close();
}

std::uint16_t UdpSwitch::port() const noexcept { return state_->gates[0]->port; }

void UdpSwitch::open_session(std::uint64_t id, const TableShape& shape, int uplink) {
  std::shared_ptr<Uplink> to_switch_above;
  if (uplink >= 0) {
    prepare_socket(uplink);
    to_switch_above = std::make_shared<Uplink>(id, uplink);
  }
  TableShape own = shape;
  own.is_leaf = uplink >= 0;
  auto session = std::make_unique<Session>(id, own, std::move(to_switch_above));
  const auto guard = state_->hold();
  state_->close_session(id);
  state_->sessions[id] = std::move(session);
  state_->uplinks_changed.store(true);
  state_->wake_up();
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
