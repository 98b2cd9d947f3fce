#include "core/liveness.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <string>

#include "core/error.h"

namespace torchrelay {
namespace {

struct Status {
  char state = 'X';
  std::uint64_t start_ticks = 0;
};

enum class Found { kYes, kNo, kUnknown };

// proc(5): "pid (name) state ppid ...", the start time is field 22. The name may hold blanks and parentheses.
Found read_status(std::int32_t pid, Status& status) noexcept {
  char path[48];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return errno == ENOENT ? Found::kNo : Found::kUnknown;
  char text[1024];
  const ssize_t size = read(fd, text, sizeof text - 1);
  const int reason = errno;
  close(fd);
  if (size <= 0) return reason == ESRCH ? Found::kNo : Found::kUnknown;
  text[size] = '\0';
  const char* rest = std::strrchr(text, ')');
  const bool parsed =
      rest != nullptr &&
      std::sscanf(rest + 1,
                  " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %" SCNu64,
                  &status.state, &status.start_ticks) == 2;
  return parsed ? Found::kYes : Found::kUnknown;
}

}  // namespace

ProcessId ProcessId::current() {
  const auto pid = static_cast<std::int32_t>(getpid());
  Status status;
  const Found found = read_status(pid, status);
  if (found == Found::kNo) throw Error(Code::kUnavailable, "there is no /proc/self/stat; is /proc mounted?");
  if (found == Found::kUnknown) throw Error(Code::kUnavailable, with_errno("reading /proc/self/stat"));
  return {pid, status.start_ticks};
}

bool alive(ProcessId process) noexcept {
  Status status;
  const Found found = read_status(process.pid, status);
  if (found != Found::kYes) return found == Found::kUnknown;
  return status.start_ticks == process.start_ticks && status.state != 'Z' && status.state != 'X';
}

}  // namespace torchrelay
