// A block of memory that several processes of one host map.
//
// The block is anonymous (anonymous_file): it has no name in any file system, so nothing is left behind
// whatever kills its users, and /dev/shm limits do not apply. Other processes attach it by address(), which
// names the creator's open descriptor, or by a descriptor they received over a Unix socket. The memory lives
// as long as any mapping or descriptor of it does; address() can be attached only while the creator keeps it
// open.
//
// The size of a memfd is sealed: no process can shrink it while others use it.
#pragma once

#include <cstddef>
#include <string>

namespace torchrelay {

// The descriptor of a new file without a name: a memfd, or where sandboxes deny memfd_create an unlinked file
// in /dev/shm, else TMPDIR, with space for size_bytes. Throws kSegment.
int anonymous_file(const std::string& label, std::size_t size_bytes = 0);

class SharedMemory {
 public:
  // A new block of size_bytes > 0, zero-filled. `label` shows in /proc/<pid>/maps. With populate, all pages
  // are allocated at once, so that the first use of each costs nothing.
  static SharedMemory create(std::size_t size_bytes, const std::string& label, bool populate = false);

  // The block another process of this host created. Throws kSegment if that process is gone or may not be
  // read.
  static SharedMemory attach(const std::string& address, bool read_only = false);

  // The block behind an open descriptor; the descriptor is duplicated, the caller keeps its own.
  static SharedMemory from_fd(int fd, bool read_only = false);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&&) = delete;
  SharedMemory(const SharedMemory&) = delete;
  ~SharedMemory();  // unmaps and closes; other processes keep theirs

  std::byte* data() const noexcept { return data_; }
  std::size_t size_bytes() const noexcept { return size_bytes_; }
  bool read_only() const noexcept { return read_only_; }
  int fd() const noexcept { return fd_; }
  std::string address() const;

 private:
  SharedMemory(int fd, bool read_only, bool populate);  // takes fd

  int fd_;
  std::byte* data_ = nullptr;
  std::size_t size_bytes_ = 0;
  bool read_only_;
};

}  // namespace torchrelay
