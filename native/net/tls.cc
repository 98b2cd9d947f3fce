#include "net/tls.h"

#include <dlfcn.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"

// OpenSSL's types and numbers, as its headers define them; the headers need not be there.
extern "C" {
struct bio_st;
struct bio_method_st;
struct ssl_st;
struct ssl_ctx_st;
struct ssl_method_st;
struct ssl_session_st;
struct ssl_cipher_st;
struct evp_md_st;
}

namespace torchrelay::net {
namespace {

constexpr int kTls13 = 0x0304;
constexpr std::array<unsigned char, 2> kCipher{0x13, 0x01};
constexpr const char* kCipherName = "TLS_AES_128_GCM_SHA256";

constexpr int kCtrlSessionCache = 44, kCtrlReadAhead = 41, kCtrlMinVersion = 123;
constexpr int kVerifyPeer = 1;
constexpr int kErrorWantRead = 2;
constexpr int kReasonOtherKey = 253, kAlertOtherKey = 1047;  // of who accepts, of who connects
constexpr unsigned long kReasonMask = 0x7f'ffff;
constexpr std::uint64_t kNoTicket = std::uint64_t{1} << 14;
constexpr int kBioSource = 0x400 | 100;
constexpr int kBioFlush = 11;
constexpr int kBioRetryRead = 0x01 | 0x08;

constexpr std::size_t kRecordBytes = std::size_t{16} << 10;   // TLS has no larger ones
constexpr std::size_t kBufferBytes = std::size_t{64} << 10;   // encrypted at once, or received
constexpr std::size_t kMaxHandshake = std::size_t{16} << 10;  // before a process has proved anything

constexpr const char* kOtherKey =
    "has another key; give all ranks the same (TORCHRELAY_TRANSPORT_KEY_FILE or TORCHRELAY_TRANSPORT_KEY)";
constexpr const char* kEnded =
    "ended the connection before it was encrypted; do all ranks have the same key "
    "(TORCHRELAY_TRANSPORT_KEY_FILE or TORCHRELAY_TRANSPORT_KEY)?";
constexpr const char* kRefused = "did not agree on encryption (";
constexpr const char* kNeeded =
    "encryption needs libssl 3, of OpenSSL (apt install libssl3, dnf install openssl-libs, conda install "
    "openssl)";
constexpr const char* kTampered = "sent bytes that its key did not encrypt: they were changed on their way";

struct Library {
  explicit Library(const std::string& path);

  // What it has of OpenSSL, by their names there.
#define TORCHRELAY_OPENSSL(X)                                                                  \
  X(unsigned long, OpenSSL_version_num, void)                                                  \
  X(const ssl_method_st*, TLS_method, void)                                                    \
  X(ssl_ctx_st*, SSL_CTX_new, const ssl_method_st*)                                            \
  X(void, SSL_CTX_free, ssl_ctx_st*)                                                           \
  X(long, SSL_CTX_ctrl, ssl_ctx_st*, int, long, void*)                                         \
  X(std::uint64_t, SSL_CTX_set_options, ssl_ctx_st*, std::uint64_t)                            \
  X(int, SSL_CTX_set_num_tickets, ssl_ctx_st*, std::size_t)                                    \
  X(int, SSL_CTX_set_ciphersuites, ssl_ctx_st*, const char*)                                   \
  X(void, SSL_set_verify, ssl_st*, int, void*)                                                 \
  X(void, SSL_CTX_set_default_read_buffer_len, ssl_ctx_st*, std::size_t)                       \
  X(void, SSL_CTX_set_psk_use_session_callback, ssl_ctx_st*,                                   \
    int (*)(ssl_st*, const evp_md_st*, const unsigned char**, std::size_t*, ssl_session_st**)) \
  X(void, SSL_CTX_set_psk_find_session_callback, ssl_ctx_st*,                                  \
    int (*)(ssl_st*, const unsigned char*, std::size_t, ssl_session_st**))                     \
  X(ssl_st*, SSL_new, ssl_ctx_st*)                                                             \
  X(void, SSL_free, ssl_st*)                                                                   \
  X(void, SSL_set_bio, ssl_st*, bio_st*, bio_st*)                                              \
  X(void, SSL_set_connect_state, ssl_st*)                                                      \
  X(void, SSL_set_accept_state, ssl_st*)                                                       \
  X(int, SSL_do_handshake, ssl_st*)                                                            \
  X(int, SSL_session_reused, const ssl_st*)                                                    \
  X(int, SSL_read_ex, ssl_st*, void*, std::size_t, std::size_t*)                               \
  X(int, SSL_write_ex, ssl_st*, const void*, std::size_t, std::size_t*)                        \
  X(int, SSL_has_pending, const ssl_st*)                                                       \
  X(int, SSL_get_error, const ssl_st*, int)                                                    \
  X(int, SSL_key_update, ssl_st*, int)                                                         \
  X(const ssl_cipher_st*, SSL_CIPHER_find, ssl_st*, const unsigned char*)                      \
  X(ssl_session_st*, SSL_SESSION_new, void)                                                    \
  X(void, SSL_SESSION_free, ssl_session_st*)                                                   \
  X(int, SSL_SESSION_set1_master_key, ssl_session_st*, const unsigned char*, std::size_t)      \
  X(int, SSL_SESSION_set_cipher, ssl_session_st*, const ssl_cipher_st*)                        \
  X(int, SSL_SESSION_set_protocol_version, ssl_session_st*, int)                               \
  X(bio_method_st*, BIO_meth_new, int, const char*)                                            \
  X(void, BIO_meth_free, bio_method_st*)                                                       \
  X(int, BIO_meth_set_write, bio_method_st*, int (*)(bio_st*, const char*, int))               \
  X(int, BIO_meth_set_read, bio_method_st*, int (*)(bio_st*, char*, int))                      \
  X(int, BIO_meth_set_ctrl, bio_method_st*, long (*)(bio_st*, int, long, void*))               \
  X(bio_st*, BIO_new, const bio_method_st*)                                                    \
  X(void, BIO_set_init, bio_st*, int)                                                          \
  X(void, BIO_set_flags, bio_st*, int)                                                         \
  X(void, BIO_clear_flags, bio_st*, int)                                                       \
  X(void, ERR_clear_error, void)                                                               \
  X(unsigned long, ERR_peek_error, void)                                                       \
  X(const char*, ERR_reason_error_string, unsigned long)
#define TORCHRELAY_MEMBER(result, name, ...) result (*name)(__VA_ARGS__) = nullptr;
  TORCHRELAY_OPENSSL(TORCHRELAY_MEMBER)
#undef TORCHRELAY_MEMBER
};

// Its handlers for the end of the process stay, so it stays loaded (RTLD_NODELETE).
Library::Library(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) throw Error(Code::kUnavailable, kNeeded + std::string("; ") + dlerror());
  const auto find = [&](const char* name) {
    void* symbol = dlsym(handle, name);
    if (symbol == nullptr)
      throw Error(Code::kUnavailable, kNeeded + ("; " + path) + " has no function " + name);
    return symbol;
  };
#define TORCHRELAY_FIND(result, name, ...) name = reinterpret_cast<result (*)(__VA_ARGS__)>(find(#name));
  TORCHRELAY_OPENSSL(TORCHRELAY_FIND)
#undef TORCHRELAY_FIND
#undef TORCHRELAY_OPENSSL
  if (OpenSSL_version_num() >> 28 < 3) throw Error(Code::kUnavailable, kNeeded + ("; " + path) + " is older");
}

}  // namespace

struct Tls::Context {
  Context(const std::string& library_path, const Key& shared_key, std::size_t until_rekey);
  ~Context();

  // The key as OpenSSL wants it; null if there is no memory.
  ssl_session_st* session(ssl_st* of) const;

  const Library library;
  const Key key;
  const std::size_t rekey_bytes;
  bio_method_st* method = nullptr;
  ssl_ctx_st* handle = nullptr;
};

namespace {

class TlsStream : public Stream {
 public:
  TlsStream(std::shared_ptr<const Tls::Context> context, Descriptor socket, bool connects, std::string name);
  ~TlsStream() override { library_.SSL_free(ssl_); }

  int fd() const noexcept override { return socket_.get(); }
  Negotiation negotiate() override;
  Moved read(std::byte* data, std::size_t size_bytes) override;
  Moved write(const iovec* parts, int count) override;
  bool has_unsent() const override;
  bool has_buffered() const override;
  std::string failure() const override;

  // What OpenSSL calls.
  static int use_session(ssl_st* ssl, const evp_md_st*, const unsigned char** id, std::size_t* id_size,
                         ssl_session_st** session);
  static int find_session(ssl_st* ssl, const unsigned char* id, std::size_t id_size,
                          ssl_session_st** session);
  static int receive(bio_st* bio, char* data, int size);
  static int keep(bio_st* bio, const char* data, int size);
  static long control(bio_st*, int command, long, void*) { return command == kBioFlush ? 1 : 0; }

 private:
  class Use;

  void push();
  void encrypt(std::span<const char> data);
  void fail(std::string reason);

  static thread_local TlsStream* current;  // whose call of OpenSSL is in progress

  const std::shared_ptr<const Tls::Context> context_;
  const Library& library_;
  const Descriptor socket_;
  const std::string name_;

  mutable std::mutex lock_;  // of what follows: in OpenSSL, reading and writing share state
  ssl_st* ssl_;
  bool is_negotiated_ = false;
  bool is_at_end_ = false;  // of what the socket receives
  bool has_ended_ = false;  // to read
  bool cannot_send_ = false;
  std::size_t handshake_bytes_ = 0;  // received
  std::size_t encrypted_bytes_ = 0;  // with the current keys
  std::vector<char> unsent_;         // encrypted
  std::size_t sent_bytes_ = 0;       // of them
  std::vector<char> record_;         // gathers small parts
  std::string failure_;
};

thread_local TlsStream* TlsStream::current = nullptr;

// Around calls of OpenSSL.
class TlsStream::Use {
 public:
  explicit Use(TlsStream& stream) : guard_(stream.lock_) {
    current = &stream;
    stream.library_.ERR_clear_error();
  }
  ~Use() { current = nullptr; }

 private:
  std::lock_guard<std::mutex> guard_;
};

}  // namespace

Tls::Context::Context(const std::string& library_path, const Key& shared_key, std::size_t until_rekey)
    : library(library_path), key(shared_key), rekey_bytes(until_rekey) {
  method = library.BIO_meth_new(kBioSource, "torchrelay");
  handle = library.SSL_CTX_new(library.TLS_method());
  if (method == nullptr || handle == nullptr ||
      library.SSL_CTX_ctrl(handle, kCtrlMinVersion, kTls13, nullptr) != 1 ||
      library.SSL_CTX_set_ciphersuites(handle, kCipherName) != 1) {
    library.SSL_CTX_free(handle);
    library.BIO_meth_free(method);
    throw Error(Code::kUnavailable, kNeeded + ("; " + library_path) + " does not offer what it uses");
  }
  library.BIO_meth_set_read(method, TlsStream::receive);
  library.BIO_meth_set_write(method, TlsStream::keep);
  library.BIO_meth_set_ctrl(method, TlsStream::control);
  library.SSL_CTX_ctrl(handle, kCtrlSessionCache, 0, nullptr);
  library.SSL_CTX_ctrl(handle, kCtrlReadAhead, 1, nullptr);
  library.SSL_CTX_set_default_read_buffer_len(handle, kBufferBytes);
  library.SSL_CTX_set_options(handle, kNoTicket);
  library.SSL_CTX_set_num_tickets(handle, 0);
  library.SSL_CTX_set_psk_use_session_callback(handle, TlsStream::use_session);
  library.SSL_CTX_set_psk_find_session_callback(handle, TlsStream::find_session);
}

Tls::Context::~Context() {
  library.SSL_CTX_free(handle);
  library.BIO_meth_free(method);
}

ssl_session_st* Tls::Context::session(ssl_st* of) const {
  ssl_session_st* made = library.SSL_SESSION_new();
  if (made == nullptr) return nullptr;
  const ssl_cipher_st* cipher = library.SSL_CIPHER_find(of, kCipher.data());
  if (cipher != nullptr && library.SSL_SESSION_set1_master_key(made, key.data(), key.size()) == 1 &&
      library.SSL_SESSION_set_cipher(made, cipher) == 1 &&
      library.SSL_SESSION_set_protocol_version(made, kTls13) == 1)
    return made;
  library.SSL_SESSION_free(made);
  return nullptr;
}

Tls::Tls(const std::string& library_path, const Key& key, std::size_t rekey_bytes)
    : context_(std::make_shared<Context>(library_path, key, rekey_bytes)) {}

Tls::~Tls() = default;

std::unique_ptr<Stream> open_stream(const Tls* tls, Descriptor socket, bool connects, std::string name) {
  if (tls == nullptr) return std::make_unique<PlainStream>(std::move(socket));
  return tls->open(std::move(socket), connects, std::move(name));
}

std::unique_ptr<Stream> Tls::open(Descriptor socket, bool connects, std::string name) const {
  return std::make_unique<TlsStream>(context_, std::move(socket), connects, std::move(name));
}

namespace {

TlsStream::TlsStream(std::shared_ptr<const Tls::Context> context, Descriptor socket, bool connects,
                     std::string name)
    : context_(std::move(context)),
      library_(context_->library),
      socket_(std::move(socket)),
      name_(std::move(name)),
      ssl_(library_.SSL_new(context_->handle)) {
  bio_st* bio = ssl_ == nullptr ? nullptr : library_.BIO_new(context_->method);
  if (bio == nullptr) {
    library_.SSL_free(ssl_);
    throw Error(Code::kUnavailable, "OpenSSL has no memory for another connection");
  }
  send_without_delay(socket_.get());
  library_.BIO_set_init(bio, 1);
  library_.SSL_set_bio(ssl_, bio, bio);
  if (connects) library_.SSL_set_verify(ssl_, kVerifyPeer, nullptr);  // no certificate takes the key's place
  (connects ? library_.SSL_set_connect_state : library_.SSL_set_accept_state)(ssl_);
}

// --- what OpenSSL calls

// The names are in clear, and protected against changes by the key.
int TlsStream::use_session(ssl_st* ssl, const evp_md_st*, const unsigned char** id, std::size_t* id_size,
                           ssl_session_st** session) {
  *id = reinterpret_cast<const unsigned char*>(current->name_.data());
  *id_size = current->name_.size();
  *session = current->context_->session(ssl);
  return *session != nullptr ? 1 : 0;
}

int TlsStream::find_session(ssl_st* ssl, const unsigned char* id, std::size_t id_size,
                            ssl_session_st** session) {
  const bool is_wanted = std::string_view(reinterpret_cast<const char*>(id), id_size) == current->name_;
  *session = is_wanted ? current->context_->session(ssl) : nullptr;
  return !is_wanted || *session != nullptr ? 1 : 0;
}

int TlsStream::receive(bio_st* bio, char* data, int size) {
  TlsStream& self = *current;
  self.library_.BIO_clear_flags(bio, kBioRetryRead);
  if (!self.is_negotiated_ && self.handshake_bytes_ > kMaxHandshake) return -1;
  const ssize_t count = ::recv(self.socket_.get(), data, static_cast<std::size_t>(size), MSG_DONTWAIT);
  if (count > 0) {
    self.handshake_bytes_ += static_cast<std::size_t>(count);
  } else if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
    self.library_.BIO_set_flags(bio, kBioRetryRead);
  } else {
    self.is_at_end_ = true;
  }
  return static_cast<int>(count);
}

int TlsStream::keep(bio_st*, const char* data, int size) {
  current->unsent_.insert(current->unsent_.end(), data, data + size);
  return size;
}

// --- the stream

// Sends what the socket takes of what is encrypted.
void TlsStream::push() {
  while (sent_bytes_ < unsent_.size()) {
    const ssize_t count = ::send(socket_.get(), unsent_.data() + sent_bytes_, unsent_.size() - sent_bytes_,
                                 MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    if (count < 0) {
      cannot_send_ = true;
      break;
    }
    sent_bytes_ += static_cast<std::size_t>(count);
  }
  unsent_.clear();
  sent_bytes_ = 0;
}

// Ends the connection, which an event loop sees.
void TlsStream::fail(std::string reason) {
  failure_ = std::move(reason);
  push();  // why, to the other end
  has_ended_ = true;
  ::shutdown(socket_.get(), SHUT_RDWR);
}

Negotiation TlsStream::negotiate() {
  const Use use(*this);
  if (has_ended_) return Negotiation::kFailed;
  if (is_negotiated_) return Negotiation::kDone;
  const int result = library_.SSL_do_handshake(ssl_);
  is_negotiated_ = result == 1 && library_.SSL_session_reused(ssl_) == 1;
  if (!is_negotiated_ && (result == 1 || library_.SSL_get_error(ssl_, result) != kErrorWantRead)) {
    const unsigned long error = library_.ERR_peek_error();
    const int reason = static_cast<int>(error & kReasonMask);
    const char* text = library_.ERR_reason_error_string(error);
    fail(is_at_end_ ? kEnded
         : reason == kReasonOtherKey || reason == kAlertOtherKey
             ? kOtherKey
             : kRefused + std::string(text == nullptr ? "no key" : text) + ")");
  }
  push();
  return has_ended_ ? Negotiation::kFailed : is_negotiated_ ? Negotiation::kDone : Negotiation::kInProgress;
}

Moved TlsStream::read(std::byte* data, std::size_t size_bytes) {
  const Use use(*this);
  Moved total;
  while (total.size_bytes < size_bytes && !has_ended_) {
    std::size_t count = 0;
    const int result =
        library_.SSL_read_ex(ssl_, data + total.size_bytes, size_bytes - total.size_bytes, &count);
    total.size_bytes += count;
    if (result == 1) continue;
    if (library_.SSL_get_error(ssl_, result) == kErrorWantRead) break;
    if (is_at_end_)
      has_ended_ = true;
    else
      fail(kTampered);
  }
  total.ended = has_ended_ && total.size_bytes == 0;
  return total;
}

// Encrypts while the socket takes all of it. Small parts share a record.
Moved TlsStream::write(const iovec* parts, int count) {
  const Use use(*this);
  std::size_t skip = 0;  // of the first part
  const auto next = [&](std::size_t limit) {
    const std::span piece(static_cast<const char*>(parts->iov_base) + skip,
                          std::min(parts->iov_len - skip, limit));
    skip += piece.size();
    if (skip == parts->iov_len) ++parts, --count, skip = 0;
    return piece;
  };
  Moved total;
  push();
  while (!cannot_send_ && unsent_.empty() && count > 0) {
    while (!cannot_send_ && unsent_.size() < kBufferBytes && count > 0) {
      std::span<const char> piece = next(kBufferBytes);
      if (piece.size() < kRecordBytes && count > 0) {
        record_.assign(piece.begin(), piece.end());
        while (record_.size() < kRecordBytes && count > 0) {
          const auto more = next(kRecordBytes - record_.size());
          record_.insert(record_.end(), more.begin(), more.end());
        }
        piece = record_;
      }
      encrypt(piece);
      total.size_bytes += piece.size();
    }
    push();
  }
  total.ended = cannot_send_;
  return total;
}

void TlsStream::encrypt(std::span<const char> data) {
  encrypted_bytes_ += data.size();
  if (encrypted_bytes_ > context_->rekey_bytes) {
    library_.SSL_key_update(ssl_, 0);
    encrypted_bytes_ = data.size();
  }
  std::size_t count = 0;
  if (library_.SSL_write_ex(ssl_, data.data(), data.size(), &count) != 1) cannot_send_ = true;
}

bool TlsStream::has_unsent() const {
  const std::lock_guard guard(lock_);
  return !unsent_.empty();
}

bool TlsStream::has_buffered() const {
  const std::lock_guard guard(lock_);
  return library_.SSL_has_pending(ssl_) == 1;
}

std::string TlsStream::failure() const {
  const std::lock_guard guard(lock_);
  return failure_;
}

}  // namespace
}  // namespace torchrelay::net
