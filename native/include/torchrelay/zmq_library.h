// libzmq, opened at run time. The pyzmq wheel carries it; no header and no link-time dependency is needed.
//
// Declares the part of the stable C API (4.3) that we use, under its own names. See api.zeromq.org for each.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace torchrelay {

struct alignas(void*) zmq_msg_t {
  unsigned char opaque[64];
};

namespace zmq {

enum SocketType { kPull = 7, kPush = 8 };

enum ContextOption { kIoThreads = 1, kMaxSockets = 3 };

enum SocketOption {
  kFd = 14,
  kLinger = 17,
  kMaxMessageSize = 22,
  kSendHighWaterMark = 23,
  kReceiveHighWaterMark = 24,
  kLastEndpoint = 32,
  kIpv6 = 42,
  kCurveServer = 47,
  kCurvePublicKey = 48,
  kCurveSecretKey = 49,
  kCurveServerKey = 50,
  kHeartbeatInterval = 75,
  kHeartbeatTimeout = 77,
};

enum Flag { kDontWait = 1, kSendMore = 2 };

}  // namespace zmq

class ZmqLibrary {
 public:
  // Throws kUnavailable if there is no such library, or it is older than 4.3.
  explicit ZmqLibrary(const std::string& path);
  ~ZmqLibrary();
  ZmqLibrary(const ZmqLibrary&) = delete;
  ZmqLibrary& operator=(const ZmqLibrary&) = delete;

  void* (*ctx_new)();
  int (*ctx_set)(void* context, int option, int value);
  int (*ctx_term)(void* context);
  void* (*socket)(void* context, int type);
  int (*close)(void* socket);
  int (*setsockopt)(void* socket, int option, const void* value, std::size_t size);
  int (*getsockopt)(void* socket, int option, void* value, std::size_t* size);
  int (*bind)(void* socket, const char* address);
  int (*connect)(void* socket, const char* address);
  int (*msg_init)(zmq_msg_t* message);
  int (*msg_init_size)(zmq_msg_t* message, std::size_t size);
  int (*msg_init_data)(zmq_msg_t* message, void* data, std::size_t size, void (*free)(void*, void*),
                       void* hint);
  int (*msg_send)(zmq_msg_t* message, void* socket, int flags);
  int (*msg_recv)(zmq_msg_t* message, void* socket, int flags);
  int (*msg_close)(zmq_msg_t* message);
  int (*msg_more)(const zmq_msg_t* message);
  void* (*msg_data)(zmq_msg_t* message);
  std::size_t (*msg_size)(const zmq_msg_t* message);
  int (*last_errno)();
  const char* (*strerror)(int number);

  // "what: libzmq's last error in this thread"
  std::string failure(const std::string& what) const;

 private:
  void* handle_;
};

// What sockets share: the I/O threads. Sockets hold it; it ends when the last of them does.
class ZmqContext {
 public:
  explicit ZmqContext(const std::string& library_path, int io_threads = 1);
  ~ZmqContext();
  ZmqContext(const ZmqContext&) = delete;
  ZmqContext& operator=(const ZmqContext&) = delete;

  const ZmqLibrary& library() const noexcept { return library_; }
  void* handle() const noexcept { return handle_; }

 private:
  ZmqLibrary library_;
  void* handle_;
};

}  // namespace torchrelay
