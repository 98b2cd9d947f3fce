// Which process made an object.
//
// A forked child has a copy of every object of its parent, but neither the parent's threads nor its place
// among other processes. The copy must not join a thread, nor write to sockets, eventfds or memory that both
// processes share.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

namespace torchrelay {

class Origin {
 public:
  Origin();

  // Whether this process was forked from the one that made this object. Costs a load.
  bool is_forked() const noexcept;

  std::int32_t pid() const noexcept { return pid_; }

 private:
  std::int32_t pid_;
  int forks_;  // between the first process and this one
};

// Deletes only in the process that made the object. The copy in a forked child stays until the child ends.
struct DeleteAtOrigin {
  Origin origin;

  template <typename T>
  void operator()(T* object) const {
    if (!origin.is_forked()) delete object;
  }
};

template <typename T>
using ProcessOwned = std::unique_ptr<T, DeleteAtOrigin>;

template <typename T, typename... Args>
ProcessOwned<T> make_process_owned(Args&&... args) {
  return ProcessOwned<T>(new T(std::forward<Args>(args)...));
}

}  // namespace torchrelay
