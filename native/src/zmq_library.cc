#include "torchrelay/zmq_library.h"

#include <dlfcn.h>

#include <cerrno>

#include "torchrelay/error.h"

namespace torchrelay {
namespace {

// One job holds a socket and a monitor per peer and channel: far above libzmq's default of 1023.
constexpr int kMaxSockets = 65535;

template <typename Function>
void find(void* handle, const char* name, Function& function) {
  void* symbol = dlsym(handle, name);
  if (symbol == nullptr)
    throw Error(Code::kUnavailable, std::string("libzmq: it has no function ") + name +
                                        "; pyzmq 26 or newer carries one that does");
  function = reinterpret_cast<Function>(symbol);
}

}  // namespace

// Its own I/O threads may outlive us inside another user of the library, so it stays loaded (RTLD_NODELETE).
ZmqLibrary::ZmqLibrary(const std::string& path)
    : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)) {
  if (handle_ == nullptr) throw Error(Code::kUnavailable, std::string("libzmq: ") + dlerror());
  try {
    void (*version)(int*, int*, int*);
    find(handle_, "zmq_version", version);
    int major = 0, minor = 0, patch = 0;
    version(&major, &minor, &patch);
    if (major != 4 || minor < 3)
      throw Error(Code::kUnavailable, "libzmq: version " + std::to_string(major) + "." +
                                          std::to_string(minor) +
                                          " was found, 4.3 is needed; pyzmq 26 or newer carries it");
    find(handle_, "zmq_ctx_new", ctx_new);
    find(handle_, "zmq_ctx_set", ctx_set);
    find(handle_, "zmq_ctx_term", ctx_term);
    find(handle_, "zmq_socket", socket);
    find(handle_, "zmq_close", close);
    find(handle_, "zmq_setsockopt", setsockopt);
    find(handle_, "zmq_getsockopt", getsockopt);
    find(handle_, "zmq_bind", bind);
    find(handle_, "zmq_connect", connect);
    find(handle_, "zmq_msg_init", msg_init);
    find(handle_, "zmq_msg_init_size", msg_init_size);
    find(handle_, "zmq_msg_init_data", msg_init_data);
    find(handle_, "zmq_msg_send", msg_send);
    find(handle_, "zmq_msg_recv", msg_recv);
    find(handle_, "zmq_msg_close", msg_close);
    find(handle_, "zmq_msg_more", msg_more);
    find(handle_, "zmq_msg_data", msg_data);
    find(handle_, "zmq_msg_size", msg_size);
    find(handle_, "zmq_errno", last_errno);
    find(handle_, "zmq_strerror", strerror);
  } catch (...) {
    dlclose(handle_);
    throw;
  }
}

ZmqLibrary::~ZmqLibrary() { dlclose(handle_); }

std::string ZmqLibrary::failure(const std::string& what) const {
  return what + ": " + strerror(last_errno());
}

ZmqContext::ZmqContext(const std::string& library_path, int io_threads)
    : library_(library_path), handle_(library_.ctx_new()) {
  if (handle_ == nullptr) throw Error(Code::kUnavailable, library_.failure("libzmq: new context"));
  library_.ctx_set(handle_, zmq::kIoThreads, io_threads);
  library_.ctx_set(handle_, zmq::kMaxSockets, kMaxSockets);
}

ZmqContext::~ZmqContext() {
  while (library_.ctx_term(handle_) != 0 && library_.last_errno() == EINTR) {
  }
}

}  // namespace torchrelay
