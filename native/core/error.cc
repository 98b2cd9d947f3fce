#include "core/error.h"

#include <cerrno>
#include <system_error>
#include <utility>

namespace torchrelay {

const char* remedy(int error) noexcept {
  switch (error) {
    case EMFILE:
      return "this process has no file descriptors left: close some, or raise its limit (ulimit -n)";
    case ENFILE: return "the system has no file descriptors left: raise fs.file-max";
    case ENOMEM:
    case ENOBUFS: return "there is no memory left: use less, or raise the limits (ulimit -v, ulimit -d)";
    case EAGAIN: return "end some threads or processes, or raise the limits (ulimit -u, ulimit -v)";
    case ENOSPC: return "free some space";
    default: return "";
  }
}

std::string with_errno(const std::string& message) {
  const int error = errno;
  const std::string todo = remedy(error);
  return message + ": " + std::generic_category().message(error) + (todo.empty() ? "" : "; ") + todo;
}

std::thread start_thread(std::function<void()> function) {
  try {
    return std::thread(std::move(function));
  } catch (const std::system_error& error) {
    errno = error.code().value();
    throw Error(Code::kUnavailable, with_errno("starting a thread"));
  }
}

}  // namespace torchrelay
