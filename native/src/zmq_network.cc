#include "torchrelay/zmq_network.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "torchrelay/error.h"
#include "torchrelay/origin.h"

namespace torchrelay {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kCopyBytes = 1024;  // below this, copying costs less than sharing
constexpr std::size_t kKeyCharacters = 40;

}  // namespace

struct ZmqNetwork::State {
  std::shared_ptr<ZmqContext> context;
  ZmqOptions options;
  std::string namespace_id = network_namespace();
  std::atomic<std::uint64_t> ignored_messages = 0;

  bool encrypted() const { return !options.curve_public_key.empty(); }
};

namespace {

// One libzmq socket; closes itself.
class Socket {
 public:
  Socket(const ZmqNetwork::State& state, int type) : zmq_(&state.context->library()) {
    handle_ = zmq_->socket(state.context->handle(), type);
    if (handle_ == nullptr) throw Error(Code::kUnavailable, zmq_->failure("libzmq: new socket"));
    const ZmqOptions& options = state.options;
    set(zmq::kSendHighWaterMark, 0);
    set(zmq::kReceiveHighWaterMark, 0);
    set(zmq::kLinger, static_cast<int>(options.linger.count()));
    const auto limit = static_cast<std::int64_t>(options.max_message_bytes);
    set(zmq::kMaxMessageSize, &limit, sizeof limit);
    if (options.heartbeat.count() > 0) {
      set(zmq::kHeartbeatInterval, static_cast<int>(options.heartbeat.count()));
      set(zmq::kHeartbeatTimeout, static_cast<int>(options.peer_timeout.count()));
    }
    if (!state.encrypted()) return;
    const std::string& key = options.curve_public_key;
    if (type == zmq::kPull) {
      set(zmq::kCurveServer, 1);
    } else {
      set(zmq::kCurveServerKey, key.c_str(), key.size());
      set(zmq::kCurvePublicKey, key.c_str(), key.size());
    }
    set(zmq::kCurveSecretKey, options.curve_secret_key.c_str(), options.curve_secret_key.size());
  }
  Socket(Socket&& other) noexcept : zmq_(other.zmq_), handle_(std::exchange(other.handle_, nullptr)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(zmq_, other.zmq_);
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Socket() {
    if (handle_ != nullptr) zmq_->close(handle_);
  }

  void* handle() const { return handle_; }

  void set(int option, const void* value, std::size_t size) {
    if (zmq_->setsockopt(handle_, option, value, size) != 0)
      throw Error(Code::kUnavailable, zmq_->failure("libzmq: socket option " + std::to_string(option)));
  }
  void set(int option, int value) { set(option, &value, sizeof value); }

  std::string bind(const std::string& address) {
    allow_ipv6(address);
    if (zmq_->bind(handle_, address.c_str()) != 0)
      throw Error(Code::kUnavailable,
                  zmq_->failure("binding " + address) + "; does this host have that interface?");
    char bound[256];
    std::size_t size = sizeof bound;
    if (zmq_->getsockopt(handle_, zmq::kLastEndpoint, bound, &size) != 0)
      throw Error(Code::kUnavailable, zmq_->failure("libzmq: bound address"));
    return bound;
  }

  void connect(const std::string& address) {
    allow_ipv6(address);
    if (zmq_->connect(handle_, address.c_str()) != 0)
      throw Error(Code::kArgument, zmq_->failure("connecting to '" + address + "'"));
  }

  int fd() const {
    int fd = -1;
    std::size_t size = sizeof fd;
    zmq_->getsockopt(handle_, zmq::kFd, &fd, &size);
    return fd;
  }

 private:
  // Only where it is needed: with it, IPv4 addresses too are bound and shown as IPv6 ones.
  void allow_ipv6(const std::string& address) {
    if (address.find('[') != std::string::npos) set(zmq::kIpv6, 1);
  }

  const ZmqLibrary* zmq_;
  void* handle_ = nullptr;
};

// A received message. The library stays loaded for ever, so its function may outlive the network.
struct Received {
  explicit Received(const ZmqLibrary& zmq) : close(zmq.msg_close) { zmq.msg_init(&message); }
  ~Received() { close(&message); }
  Received(const Received&) = delete;
  Received& operator=(const Received&) = delete;

  zmq_msg_t message;
  int (*close)(zmq_msg_t*);
};

void release_message(void*, void* hint) { delete static_cast<Message*>(hint); }

class ZmqEndpoint final : public Endpoint {
 public:
  explicit ZmqEndpoint(std::shared_ptr<ZmqNetwork::State> state)
      : state_(std::move(state)), zmq_(state_->context->library()), inbound_(*state_, zmq::kPull) {
    const std::string tcp = inbound_.bind("tcp://" + bracketed(state_->options.interface) + ":*");
    address_ = tcp;
    if (state_->options.local_sockets && !state_->namespace_id.empty())
      address_ += "|" + inbound_.bind("ipc://@" + random_socket_name()) + "|" + state_->namespace_id;
    preamble_ = {kSessionMagic, kZmqProtocolVersion, 0, state_->options.token};
  }

  std::string address() const override { return address_; }

  void connect(std::uint32_t peer, const std::string& address) override {
    Socket socket(*state_, zmq::kPush);
    socket.connect(reachable(address, state_->options.local_sockets ? state_->namespace_id : "").address);
    outbound_.insert_or_assign(peer, std::move(socket));
  }

  void disconnect(std::uint32_t peer) override { outbound_.erase(peer); }

  void send(std::uint32_t peer, Message message) override {
    const auto found = outbound_.find(peer);
    if (found == outbound_.end())
      throw Error(Code::kArgument, "send to " + std::to_string(peer) + ": no such peer was connected");
    if (message.size_bytes() > state_->options.max_message_bytes)
      throw Error(Code::kArgument, "send to " + std::to_string(peer) + ": " +
                                       std::to_string(message.size_bytes()) +
                                       " bytes are more than the limit of " +
                                       std::to_string(state_->options.max_message_bytes));
    void* socket = found->second.handle();
    zmq_msg_t preamble;
    zmq_.msg_init_size(&preamble, sizeof preamble_);
    std::memcpy(zmq_.msg_data(&preamble), &preamble_, sizeof preamble_);
    if (!send_frame(&preamble, socket, zmq::kSendMore)) return;
    zmq_msg_t payload;
    if (message.size_bytes() <= kCopyBytes) {
      zmq_.msg_init_size(&payload, message.size_bytes());
      if (message.size_bytes() != 0)
        std::memcpy(zmq_.msg_data(&payload), message.data(), message.size_bytes());
    } else {
      auto* holder = new Message(std::move(message));
      zmq_.msg_init_data(&payload, holder->data(), holder->size_bytes(), release_message, holder);
    }
    send_frame(&payload, socket, 0);
  }

  bool receive(Message& message, std::chrono::microseconds timeout) override {
    if (try_receive(message)) return true;
    const auto start = Clock::now();
    const auto spin_end = start + std::min(timeout, state_->options.spin);
    while (Clock::now() < spin_end) {
      std::this_thread::yield();
      if (try_receive(message)) return true;
    }
    const auto deadline = start + timeout;
    for (auto now = Clock::now(); now < deadline; now = Clock::now()) {
      wait(deadline - now);
      if (try_receive(message)) return true;
    }
    return false;
  }

 private:
  static std::string bracketed(const std::string& interface) {
    return interface.find(':') == std::string::npos ? interface : "[" + interface + "]";
  }

  // False if there is no connection and none will be made: the peer refused this one's keys or version of
  // ZMTP. The message is lost, as with any connection that breaks.
  bool send_frame(zmq_msg_t* frame, void* socket, int flags) {
    while (zmq_.msg_send(frame, socket, flags | zmq::kDontWait) < 0) {
      if (zmq_.last_errno() == EINTR) continue;
      const bool refused = zmq_.last_errno() == EAGAIN;
      const std::string message = zmq_.failure("sending a message");
      zmq_.msg_close(frame);
      if (refused) return false;
      throw Error(Code::kUnavailable, message);
    }
    return true;
  }

  // libzmq clears this descriptor before it reports EAGAIN, so that no message can be missed here.
  void wait(Clock::duration longest) {
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(longest).count();
    timespec pause{};
    pause.tv_sec = ns / 1'000'000'000;
    pause.tv_nsec = ns % 1'000'000'000;
    pollfd item{inbound_.fd(), POLLIN, 0};
    ppoll(&item, 1, &pause, nullptr);
  }

  bool receive_frame(Received& frame) {
    while (zmq_.msg_recv(&frame.message, inbound_.handle(), zmq::kDontWait) < 0) {
      if (zmq_.last_errno() == EINTR) continue;
      if (zmq_.last_errno() == EAGAIN) return false;
      throw Error(Code::kUnavailable, zmq_.failure("receiving a message"));
    }
    return true;
  }

  void drop_rest(Received& frame) {
    while (zmq_.msg_more(&frame.message) != 0)
      if (!receive_frame(frame)) return;
    state_->ignored_messages.fetch_add(1, std::memory_order_relaxed);
  }

  // The next message of the session; those of strangers before it are dropped.
  bool try_receive(Message& message) {
    Received first(zmq_);
    while (receive_frame(first)) {
      const auto version = version_of(first);
      auto payload = std::make_shared<Received>(zmq_);
      if (!version || !receive_frame(*payload)) {
        drop_rest(first);
        continue;
      }
      if (zmq_.msg_more(&payload->message) != 0) {
        drop_rest(*payload);
        continue;
      }
      if (*version != kZmqProtocolVersion)
        throw Error(Code::kProtocol, "a peer speaks version " + std::to_string(*version) +
                                         " of the message protocol, this process version " +
                                         std::to_string(kZmqProtocolVersion) +
                                         "; install the same torchrelay on all nodes");
      message = wrap(std::move(payload));
      return true;
    }
    return false;
  }

  // The protocol version of the session's peer that sent this preamble; nothing if it is a stranger's.
  std::optional<std::uint16_t> version_of(Received& frame) const {
    if (zmq_.msg_size(&frame.message) != sizeof(Preamble) || zmq_.msg_more(&frame.message) == 0)
      return std::nullopt;
    Preamble preamble;
    std::memcpy(&preamble, zmq_.msg_data(&frame.message), sizeof preamble);
    if (preamble.magic != kSessionMagic || !equal(preamble.token, preamble_.token)) return std::nullopt;
    return preamble.version;
  }

  // Small messages lie anywhere in a buffer that they share; those that are not aligned to 8 bytes are
  // copied.
  Message wrap(std::shared_ptr<Received> payload) {
    auto* data = static_cast<std::byte*>(zmq_.msg_data(&payload->message));
    const std::size_t size_bytes = zmq_.msg_size(&payload->message);
    if (reinterpret_cast<std::uintptr_t>(data) % 8 == 0) return Message(data, size_bytes, std::move(payload));
    Message copy = Message::allocate(size_bytes);
    std::memcpy(copy.data(), data, size_bytes);
    return copy;
  }

  std::shared_ptr<ZmqNetwork::State> state_;
  const ZmqLibrary& zmq_;
  Socket inbound_;
  std::string address_;
  Preamble preamble_;
  std::unordered_map<std::uint32_t, Socket> outbound_;
};

}  // namespace

ZmqNetwork::ZmqNetwork(std::shared_ptr<ZmqContext> context, ZmqOptions options)
    : state_(make_process_owned<State>()) {
  if (options.curve_public_key.size() != options.curve_secret_key.size() ||
      (!options.curve_public_key.empty() && options.curve_public_key.size() != kKeyCharacters))
    throw Error(Code::kArgument, "CURVE keys: give both the public and the secret key, 40 characters each");
  state_->context = std::move(context);
  state_->options = std::move(options);
}

ZmqNetwork::~ZmqNetwork() = default;

std::unique_ptr<Endpoint> ZmqNetwork::open(const std::string&) {
  return std::make_unique<ZmqEndpoint>(state_);
}

std::uint64_t ZmqNetwork::ignored_messages() const noexcept { return state_->ignored_messages; }

}  // namespace torchrelay
