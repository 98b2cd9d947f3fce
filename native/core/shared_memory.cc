#include "core/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "core/error.h"

namespace torchrelay {
namespace {

// Transparent huge pages pay from here on: fewer faults at first touch, fewer TLB misses after.
constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

struct stat status_of(int fd) {
  struct stat status{};
  if (fstat(fd, &status) != 0) throw Error(Code::kSegment, with_errno("shared memory: fstat"));
  return status;
}

// An unlinked file in `folder`, all of whose bytes are allocated: one that did not fit would end the process
// at its first use. -1, and errno, if there is none.
int unlinked_file(const std::string& folder, std::size_t size_bytes) {
  std::string path = folder + "/torchrelay-XXXXXX";
  const int fd = mkostemp(path.data(), O_CLOEXEC);
  if (fd < 0) return fd;
  unlink(path.c_str());
  const int error = size_bytes == 0 ? 0 : posix_fallocate(fd, 0, static_cast<off_t>(size_bytes));
  if (error == 0) return fd;
  close(fd);
  errno = error;
  return -1;
}

}  // namespace

int anonymous_file(const std::string& label, std::size_t size_bytes) {
  const int memfd = memfd_create(label.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (memfd >= 0) return memfd;
  std::string why = with_errno("shared memory: memfd_create");
  if (errno != EPERM && errno != EACCES && errno != ENOSYS) throw Error(Code::kSegment, why);
  const char* given = std::getenv("TMPDIR");
  for (const std::string folder : {"/dev/shm", given == nullptr || *given == '\0' ? "/tmp" : given}) {
    if (const int fd = unlinked_file(folder, size_bytes); fd >= 0) return fd;
    why += with_errno("; a file in " + folder);
  }
  throw Error(Code::kSegment, why + "; allow memfd_create, or set TMPDIR to a folder with " +
                                  std::to_string(size_bytes) + " bytes of space");
}

SharedMemory::SharedMemory(int fd, bool read_only, bool populate) : fd_(fd), read_only_(read_only) {
  try {
    size_bytes_ = static_cast<std::size_t>(status_of(fd).st_size);
    if (size_bytes_ == 0) throw Error(Code::kSegment, "shared memory: the descriptor's size is 0 bytes");
    const int protection = read_only ? PROT_READ : PROT_READ | PROT_WRITE;
    void* data = mmap(nullptr, size_bytes_, protection, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED)
      throw Error(Code::kSegment,
                  with_errno("shared memory: mapping " + std::to_string(size_bytes_) + " bytes"));
    data_ = static_cast<std::byte*>(data);
  } catch (...) {
    close(fd);
    throw;
  }
  if (size_bytes_ >= kHugePageBytes) madvise(data_, size_bytes_, MADV_HUGEPAGE);  // advice: may be refused
  if (populate && madvise(data_, size_bytes_, MADV_POPULATE_WRITE) != 0) {
    const auto message = with_errno("shared memory: populating " + std::to_string(size_bytes_) + " bytes");
    munmap(data_, size_bytes_);
    close(fd);
    throw Error(Code::kSegment, message + "; is there enough free memory?");
  }
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      size_bytes_(other.size_bytes_),
      read_only_(other.read_only_) {}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, size_bytes_);
  if (fd_ >= 0) close(fd_);
}

SharedMemory SharedMemory::create(std::size_t size_bytes, const std::string& label, bool populate) {
  if (size_bytes == 0) throw Error(Code::kArgument, "shared memory: size_bytes must be at least 1");
  const int fd = anonymous_file(label, size_bytes);
  if (ftruncate(fd, static_cast<off_t>(size_bytes)) != 0) {
    const auto message =
        with_errno("shared memory: sizing a block of " + std::to_string(size_bytes) + " bytes");
    close(fd);
    throw Error(Code::kSegment, message);
  }
  // A file in a folder, which is allocated instead, cannot be sealed.
  fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  return SharedMemory(fd, false, populate);
}

SharedMemory SharedMemory::attach(const std::string& address, bool read_only) {
  long pid = 0;
  int remote_fd = -1;
  unsigned long inode = 0;
  if (std::sscanf(address.c_str(), "%ld:%d:%lu", &pid, &remote_fd, &inode) != 3)
    throw Error(Code::kArgument, "shared memory: '" + address + "' is no address of a segment");
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(remote_fd);
  const int fd = open(path.c_str(), (read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC);
  if (fd < 0)
    throw Error(Code::kSegment,
                with_errno("shared memory: attaching the segment of process " + std::to_string(pid)) +
                    "; is that process alive, on this host, and of the same user?");
  const struct stat status = status_of(fd);
  if (status.st_ino != inode) {
    close(fd);
    throw Error(Code::kSegment, "shared memory: process " + std::to_string(pid) + " has closed that segment");
  }
  return SharedMemory(fd, read_only, false);
}

SharedMemory SharedMemory::from_fd(int fd, bool read_only) {
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) throw Error(Code::kSegment, with_errno("shared memory: descriptor " + std::to_string(fd)));
  return SharedMemory(own, read_only, false);
}

std::string SharedMemory::address() const {
  return std::to_string(getpid()) + ":" + std::to_string(fd_) + ":" + std::to_string(status_of(fd_).st_ino);
}

}  // namespace torchrelay
