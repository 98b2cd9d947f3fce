#include "core/shared_memory.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "check.h"

using torchrelay::Code;
using torchrelay::SharedMemory;

TEST(a_new_block_is_zero_and_writable) {
  auto memory = SharedMemory::create(10000, "test");
  CHECK(memory.size_bytes() == 10000);
  for (std::size_t i = 0; i < memory.size_bytes(); ++i) CHECK(memory.data()[i] == std::byte{0});
  std::memset(memory.data(), 7, memory.size_bytes());
}

TEST(an_attached_block_is_the_same_memory) {
  auto memory = SharedMemory::create(4096, "test", true);
  auto other = SharedMemory::attach(memory.address());
  CHECK(other.data() != memory.data());
  other.data()[4095] = std::byte{42};
  CHECK(memory.data()[4095] == std::byte{42});
  auto third = SharedMemory::from_fd(memory.fd(), true);
  CHECK(third.read_only() && third.data()[4095] == std::byte{42});
}

TEST(another_process_attaches_and_survives_the_creator) {
  int to_parent[2];
  CHECK(pipe(to_parent) == 0);
  const pid_t child = fork();
  if (child == 0) {
    auto memory = SharedMemory::create(1 << 20, "test");
    memory.data()[99] = std::byte{5};
    const std::string address = memory.address();
    (void)!write(to_parent[1], address.c_str(), address.size() + 1);
    pause();
  }
  char address[128];
  CHECK(read(to_parent[0], address, sizeof address) > 0);
  auto memory = SharedMemory::attach(address);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  CHECK(memory.data()[99] == std::byte{5});
  CHECK_THROWS(Code::kSegment, SharedMemory::attach(address));
  close(to_parent[0]);
  close(to_parent[1]);
}

TEST(a_block_cannot_be_resized) {
  auto memory = SharedMemory::create(8192, "test");
  CHECK(ftruncate(memory.fd(), 4096) != 0);
  CHECK(ftruncate(memory.fd(), 16384) != 0);
}

TEST(wrong_arguments_throw) {
  CHECK_THROWS(Code::kArgument, SharedMemory::create(0, "test"));
  CHECK_THROWS(Code::kArgument, SharedMemory::attach("nonsense"));
  CHECK_THROWS(Code::kSegment, SharedMemory::attach("999999999:3:17"));
  CHECK_THROWS(Code::kSegment, SharedMemory::from_fd(-1));
  auto memory = SharedMemory::create(1, "test");
  CHECK_THROWS(Code::kSegment, SharedMemory::attach(memory.address() + "0"));  // another inode
  CHECK_THROWS(Code::kSegment, SharedMemory::create(std::size_t{1} << 62, "test"));
}

TEST(threads_share_a_block) {
  auto memory = SharedMemory::create(1 << 16, "test");
  const std::string address = memory.address();
  std::thread writer([&] { std::memset(SharedMemory::attach(address).data(), 1, 1 << 15); });
  std::memset(memory.data() + (1 << 15), 2, 1 << 15);
  writer.join();
  CHECK(memory.data()[0] == std::byte{1} && memory.data()[(1 << 16) - 1] == std::byte{2});
}
