#include "torchrelay/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "torchrelay/error.h"

namespace torchrelay {
namespace {

// Transparent huge pages pay from here on: fewer faults at first touch, fewer TLB misses after.
constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

struct stat status_of(int fd) {
  struct stat status{};
  if (fstat(fd, &status) != 0) throw Error(Code::kSegment, with_errno("shared memory: fstat"));
  return status;
}

}  // namespace

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
  const int fd = memfd_create(label.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw Error(Code::kSegment, with_errno("shared memory: memfd_create"));
  if (ftruncate(fd, static_cast<off_t>(size_bytes)) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const auto message =
        with_errno("shared memory: sizing a block of " + std::to_string(size_bytes) + " bytes");
    close(fd);
    throw Error(Code::kSegment, message);
  }
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
