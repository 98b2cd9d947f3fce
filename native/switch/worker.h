// One host's worker: sums arrays over all workers of a session through a switch.
//
// Each thread has a connected socket, a stream and its part of the window and of each job. Chunks that cannot
// be quantized (quantizer.h) are gathered afterwards, as a job of int32 in which every worker fills its own
// part, and added in float32 in the order of the workers: so NaN, Inf and large numbers come out as IEEE 754
// says, with the same bits everywhere.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/origin.h"
#include "switch/stream.h"

namespace torchrelay {

enum class Dtype : std::uint8_t;

namespace switchml {

struct WorkerOptions {
  std::string switch_name;  // for errors
  std::uint32_t rank = 0;
  std::uint32_t num_workers = 1;
  std::uint16_t numel = kMaxNumel;
  std::uint16_t max_outstanding = 256;  // packets, over all threads
  RetryPolicy retry;
  bool segmentation = true;  // UDP GSO
};

struct WorkerStats {
  std::uint64_t jobs = 0;
  std::uint64_t payload_bytes = 0;
  std::uint64_t exact_chunks = 0;  // float32 chunks that could not be quantized
  double busy_s = 0;
  StreamStats packets;
};

class Worker {
 public:
  // Takes sockets that are connected to the switch, and known to it, in the order of the threads.
  Worker(const WorkerOptions& options, const std::vector<int>& sockets);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Replaces `count` elements, kInt32 or kFloat32, by their sum over the workers. All workers make the same
  // calls in the same order. Blocks; calls `poll` some times a second, which may throw to stop.
  //
  // Throws kArgument (nothing has been done), kTimeout, kPeerLost (nothing listens at the switch, or it does
  // not know the session). After a throw of the last two, or of `poll`, the values are undefined, nothing
  // uses them any more, and every later call throws kPeerLost: the slots' sets are no longer known.
  void all_reduce(void* values, std::size_t count, Dtype dtype, Microseconds timeout,
                  const std::function<void()>& poll);

  WorkerStats stats() const;

  // Ends the threads and closes the sockets. A call in progress throws kPeerLost; if it is in this thread,
  // whose signal handler closes the worker, the sockets stay open until the destructor. In a forked child it
  // does nothing, nor does the destructor.
  void close();

 private:
  class Lane;
  struct Shared;
  struct Call;

  void run(const Call& call, std::byte* values, std::size_t count, bool is_float);
  void sum_exact_chunks(const Call& call, float* values, std::size_t count);
  void wait(const Call& call);
  void check_usable() const;
  [[noreturn]] void fail(const Call& call, Code code, const std::string& why);

  WorkerOptions options_;
  Origin origin_;
  ProcessOwned<Shared> shared_;
  std::vector<ProcessOwned<Lane>> lanes_;
  std::uint8_t job_ = 0;
  std::string broken_;  // why
};

}  // namespace switchml
}  // namespace torchrelay
