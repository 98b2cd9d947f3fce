#include "switch/worker.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <thread>

#include "core/error.h"
#include "core/reduce.h"
#include "switch/datagrams.h"

namespace torchrelay::switchml {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Microseconds kBetweenPolls{50'000};
constexpr std::chrono::seconds kBetweenSigns{1};  // of life, of a worker without a task
constexpr std::size_t kGatheredBytes = 8 << 20;   // of a job that gathers chunks

Microseconds now() { return std::chrono::duration_cast<Microseconds>(Clock::now().time_since_epoch()); }

std::string seconds(Microseconds time) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(time.count()) / 1e6);
  return text;
}

// The part of `count` elements that thread `index` of `size` sums: the remainder goes to the first threads.
std::pair<std::size_t, std::size_t> part(std::size_t count, std::size_t index, std::size_t size) {
  const std::size_t each = count / size;
  const std::size_t rest = count % size;
  return {index * each + std::min(index, rest), each + (index < rest ? 1 : 0)};
}

}  // namespace

enum class Trouble { kNone, kRefused, kUnknownSession };

struct Worker::Shared {
  std::mutex in_use;  // held during a call
  std::atomic<std::thread::id> caller{};
  mutable std::mutex lock;
  std::condition_variable changed;
  std::size_t num_busy = 0;  // lanes with a task
  Trouble trouble = Trouble::kNone;
  std::atomic<bool> abort{false};  // lanes give up their task
  std::atomic<bool> stop{false};   // lanes end
  WorkerStats stats;
};

struct Worker::Call {
  Microseconds begin;
  Microseconds deadline;
  const char* dtype;
  std::size_t count;
  const std::function<void()>* poll;
};

// A thread with its socket and stream.
class Worker::Lane {
 public:
  Lane(Shared& shared, const WorkerOptions& options, const StreamShape& shape, int socket)
      : shared_(shared),
        socket_(socket),
        wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
        stream_(shape),
        inbox_(socket),
        outbox_(socket, true),
        queue_(packet_bytes(shape.numel)) {
    outbox_.set_segmentation(options.segmentation);
    prepare_socket(socket);
    thread_ = start_thread([this] { loop(); });
  }

  ~Lane() {
    wake();
    thread_.join();
    ::close(wake_);
    ::close(socket_);
  }

  // Under the shared lock, while the lane has no task.
  void give(std::byte* values, std::size_t count, bool is_float, std::uint8_t job) {
    values_ = values;
    count_ = count;
    is_float_ = is_float;
    job_ = job;
    has_task_ = true;
    ++shared_.num_busy;
  }

  void wake() {
    const std::uint64_t one = 1;
    (void)!write(wake_, &one, sizeof one);
  }

  // While the lane has no task.
  const Stream& stream() const { return stream_; }

 private:
  void loop() {
    while (wait_for_task()) {
      run();
      const std::lock_guard guard(shared_.lock);
      has_task_ = false;
      progress_ = stream_.stats();
      if (--shared_.num_busy == 0) shared_.changed.notify_all();
    }
  }

  bool wait_for_task() {
    std::unique_lock guard(shared_.lock);
    const auto is_due = [this] { return has_task_ || shared_.stop.load(); };
    while (!shared_.changed.wait_for(guard, kBetweenSigns, is_due)) {
      guard.unlock();
      send_sign_of_life();
      guard.lock();
    }
    return has_task_;
  }

  // The switch ends a session whose workers are all silent.
  void send_sign_of_life() {
    std::byte message[kAliveBytes];
    write_alive(message);
    (void)::send(socket_, message, sizeof message, MSG_DONTWAIT);
  }

  void run() {
    std::uint64_t woken = 0;
    (void)!read(wake_, &woken, sizeof woken);
    int error = 0;  // of a sign of life: the switch may be there again
    socklen_t size = sizeof error;
    (void)getsockopt(socket_, SOL_SOCKET, SO_ERROR, &error, &size);
    while (inbox_.receive([](Bytes, const Endpoint&) {})) {  // results of jobs that are over
    }
    if (is_float_)
      stream_.begin(reinterpret_cast<float*>(values_), count_, job_, queue_, now());
    else
      stream_.begin(reinterpret_cast<std::int32_t*>(values_), count_, job_, queue_, now());
    send();
    while (!stream_.done() && !shared_.abort.load(std::memory_order_relaxed)) step();
  }

  void step() {
    const auto take = [this](Bytes datagram, const Endpoint&) {
      if (const auto notice = parse_notice(datagram))
        handle(*notice);
      else
        stream_.receive(datagram, queue_, now());
    };
    if (!inbox_.receive(take) && queue_.size() == 0) sleep();
    stream_.tick(queue_, now());
    send();
    if (inbox_.refused() || outbox_.refused()) report(Trouble::kRefused);
  }

  void send() {
    outbox_.send_run(queue_.bytes(), queue_.packet_bytes());
    queue_.clear();
  }

  // Until a datagram comes, the next timer ends, or someone wakes us.
  void sleep() {
    const auto left = std::clamp(stream_.next_deadline() - now(), Microseconds{0}, kBetweenPolls);
    const timespec time{0, static_cast<long>(left.count() * 1000)};
    pollfd fds[] = {{socket_, POLLIN, 0}, {wake_, POLLIN, 0}};
    (void)ppoll(fds, 2, &time, nullptr);
  }

  void handle(ControlKind notice) {
    if (notice == kCoalesced) outbox_.set_segmentation(false);
    if (notice == kUnknownSession) report(Trouble::kUnknownSession);
  }

  void report(Trouble trouble) {
    const std::lock_guard guard(shared_.lock);
    if (shared_.trouble == Trouble::kNone) shared_.trouble = trouble;
    shared_.abort.store(true);
  }

 public:
  StreamStats progress_;  // under the shared lock: as of the last task

 private:
  Shared& shared_;
  int socket_;
  int wake_;
  Stream stream_;
  Inbox inbox_;
  Outbox outbox_;
  PacketQueue queue_;
  std::byte* values_ = nullptr;
  std::size_t count_ = 0;
  bool is_float_ = false;
  std::uint8_t job_ = 0;
  bool has_task_ = false;
  std::thread thread_;
};

Worker::Worker(const WorkerOptions& options, const std::vector<int>& sockets)
    : options_(options), shared_(make_process_owned<Shared>()) {
  const std::size_t threads = sockets.size();
  if (threads == 0 || options.max_outstanding < threads || options.rank >= options.num_workers)
    throw Error(
        Code::kArgument,
        "switch: a worker needs at least one thread, one outstanding packet per thread, and a rank below "
        "the number of workers");
  const auto window = static_cast<std::uint16_t>(options.max_outstanding / threads);
  for (std::size_t i = 0; i < threads; ++i) {
    const StreamShape shape{static_cast<std::uint16_t>(i * window), window, options.numel,
                            options.num_workers, options.retry};
    lanes_.push_back(make_process_owned<Lane>(*shared_, options, shape, sockets[i]));
  }
}

Worker::~Worker() { close(); }

void Worker::close() {
  if (origin_.is_forked()) return;
  {
    const std::lock_guard guard(shared_->lock);
    shared_->stop.store(true);
    shared_->abort.store(true);
    shared_->changed.notify_all();
    for (auto& lane : lanes_) lane->wake();
  }
  if (shared_->caller.load() == std::this_thread::get_id()) return;  // the destructor does the rest
  const std::lock_guard in_use(shared_->in_use);
  broken_ = "the worker was closed";
  std::vector<ProcessOwned<Lane>> ending;  // destroyed without the lock, which their threads need to end
  const std::lock_guard guard(shared_->lock);
  ending.swap(lanes_);
}

void Worker::check_usable() const {
  if (!broken_.empty())
    throw Error(Code::kPeerLost,
                "switch " + options_.switch_name +
                    ": this session cannot be used any more; its first error was: " + broken_);
}

void Worker::all_reduce(void* values, std::size_t count, Dtype dtype, Microseconds timeout,
                        const std::function<void()>& poll) {
  if (dtype != Dtype::kInt32 && dtype != Dtype::kFloat32)
    throw Error(Code::kArgument, std::string("switch: it sums int32 and float32, not ") + name(dtype));
  if (shared_->caller.load() == std::this_thread::get_id())
    throw Error(Code::kUnavailable,
                "switch " + options_.switch_name +
                    ": a signal handler made this call while its thread was in another one of the same "
                    "session; set a flag in the handler, and make the call after that one");
  const std::lock_guard in_use(shared_->in_use);
  const struct Caller {
    explicit Caller(std::atomic<std::thread::id>& id) : id_(id) { id_ = std::this_thread::get_id(); }
    ~Caller() { id_ = std::thread::id{}; }
    std::atomic<std::thread::id>& id_;
  } caller(shared_->caller);
  check_usable();
  const Microseconds begin = now();
  const Call call{begin, begin + timeout, name(dtype), count, &poll};
  try {
    run(call, static_cast<std::byte*>(values), count, dtype == Dtype::kFloat32);
    if (dtype == Dtype::kFloat32) sum_exact_chunks(call, static_cast<float*>(values), count);
  } catch (const std::exception& error) {
    broken_ = error.what();
    throw;
  }
  const std::lock_guard guard(shared_->lock);
  ++shared_->stats.jobs;
  shared_->stats.payload_bytes += count * sizeof(float);
  shared_->stats.busy_s += static_cast<double>((now() - begin).count()) / 1e6;
}

void Worker::run(const Call& call, std::byte* values, std::size_t count, bool is_float) {
  ++job_;
  {
    const std::lock_guard guard(shared_->lock);
    // Once the worker is closed, no lane would end its task.
    for (std::size_t i = 0; i < lanes_.size() && !shared_->stop.load(); ++i) {
      const auto [first, size] = part(count, i, lanes_.size());
      if (size != 0) lanes_[i]->give(values + first * sizeof(float), size, is_float, job_);
    }
    shared_->changed.notify_all();
  }
  wait(call);
}

// On any end but success the lanes let go of the values before this returns.
void Worker::wait(const Call& call) {
  Shared& shared = *shared_;
  std::exception_ptr interrupted;
  bool late = false;
  std::unique_lock guard(shared.lock);
  const auto idle = [&] { return shared.num_busy == 0; };
  while (!shared.changed.wait_for(guard, kBetweenPolls, idle)) {
    if (shared.abort.load()) continue;
    late = now() >= call.deadline;
    guard.unlock();
    try {
      (*call.poll)();
    } catch (...) {
      interrupted = std::current_exception();
    }
    guard.lock();
    if (late || interrupted) {
      shared.abort.store(true);
      for (auto& lane : lanes_) lane->wake();
    }
  }
  if (!shared.abort.load()) return;
  if (interrupted) std::rethrow_exception(interrupted);
  if (shared.stop.load()) fail(call, Code::kPeerLost, "the worker was closed");
  if (shared.trouble == Trouble::kRefused)
    fail(call, Code::kPeerLost, "nothing listens there any more; was the switch stopped?");
  if (shared.trouble == Trouble::kUnknownSession)
    fail(call, Code::kPeerLost,
         "it does not know this session; was it restarted, or did all workers send nothing for seconds?");
  fail(call, Code::kTimeout, "timed out");
}

void Worker::fail(const Call& call, Code code, const std::string& why) {
  std::size_t done = 0;
  std::size_t all = 0;
  for (const auto& lane : lanes_) {
    done += lane->stream().num_done();
    all += lane->stream().num_packets();
  }
  throw Error(code, "switch " + options_.switch_name + ": all_reduce of " + std::to_string(call.count) + " " +
                        call.dtype + ", worker " + std::to_string(options_.rank) + " of " +
                        std::to_string(options_.num_workers) + ": " + why + " (after " +
                        seconds(now() - call.begin) + ", with " + std::to_string(done) + " of " +
                        std::to_string(all) + " results)");
}

void Worker::sum_exact_chunks(const Call& call, float* values, std::size_t count) {
  struct Piece {
    float* values;
    std::size_t size;
  };
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    const auto [first, size] = part(count, i, lanes_.size());
    if (size == 0) continue;
    std::vector<std::size_t> chunks = lanes_[i]->stream().exact_chunks();
    std::sort(chunks.begin(), chunks.end());
    for (const std::size_t chunk : chunks)
      pieces.push_back({values + first + chunk * options_.numel,
                        std::min<std::size_t>(options_.numel, size - chunk * options_.numel)});
  }
  const std::size_t workers = options_.num_workers;
  const std::size_t row = options_.numel * workers;  // one chunk of each worker
  const std::size_t most = std::max<std::size_t>(1, kGatheredBytes / (row * sizeof(float)));
  for (std::size_t begin = 0; begin < pieces.size(); begin += most) {
    const std::size_t end = std::min(begin + most, pieces.size());
    std::vector<std::int32_t> gathered((end - begin) * row);
    const auto part_of = [&](std::size_t piece, std::size_t rank) {
      return &gathered[(piece - begin) * row + rank * options_.numel];
    };
    for (std::size_t i = begin; i < end; ++i)
      std::memcpy(part_of(i, options_.rank), pieces[i].values, pieces[i].size * sizeof(float));
    run(call, reinterpret_cast<std::byte*>(gathered.data()), gathered.size(), false);
    const Kernel sum = find_kernel(Dtype::kFloat32, Op::kSum);
    for (std::size_t i = begin; i < end; ++i) {
      std::vector<const std::byte*> sources;
      for (std::size_t rank = 0; rank < workers; ++rank)
        sources.push_back(reinterpret_cast<const std::byte*>(part_of(i, rank)));
      sum(sources.data(), static_cast<int>(workers), reinterpret_cast<std::byte*>(pieces[i].values),
          pieces[i].size);
    }
  }
  const std::lock_guard guard(shared_->lock);
  shared_->stats.exact_chunks += pieces.size();
}

WorkerStats Worker::stats() const {
  const std::lock_guard guard(shared_->lock);
  WorkerStats stats = shared_->stats;
  for (const auto& lane : lanes_) {
    stats.packets.sent += lane->progress_.sent;
    stats.packets.results += lane->progress_.results;
    stats.packets.retransmissions += lane->progress_.retransmissions;
    stats.packets.discarded += lane->progress_.discarded;
  }
  return stats;
}

}  // namespace torchrelay::switchml
