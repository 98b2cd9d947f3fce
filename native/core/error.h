// One exception for everything that can go wrong in the native core.
//
// The core never aborts and never prints: it throws Error, and the caller decides. bind/ turns each Code into
// the Python error of the same name.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace torchrelay {

enum class Code {
  kArgument,     // a caller's argument is wrong; nothing was changed
  kSegment,      // shared memory cannot be created, attached or mapped
  kUnavailable,  // this machine lacks what was asked for
  kMismatch,     // ranks made different calls
  kTimeout,      // an operation did not end in time; ranks() are those missing
  kPeerLost,     // a peer died; ranks() are those lost
  kProtocol,     // a peer sent what the protocol does not allow
  kInterrupted,  // the caller's interrupt hook asked to stop
};

class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& message, std::vector<int> ranks = {})
      : std::runtime_error(message), code_(code), ranks_(std::move(ranks)) {}

  Code code() const noexcept { return code_; }
  const std::vector<int>& ranks() const noexcept { return ranks_; }

 private:
  Code code_;
  std::vector<int> ranks_;
};

// What to do where this process or the system has run out of what a call with this errno needs; empty for
// others.
const char* remedy(int error) noexcept;

// "message: what errno says", and the remedy. Call it before anything else can change errno.
std::string with_errno(const std::string& message);

// As std::thread. Throws kUnavailable if no thread can be started.
std::thread start_thread(std::function<void()> function);

}  // namespace torchrelay
