// Encrypted connections: TLS 1.3 between processes that share a key, by an OpenSSL that is opened at run
// time.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "net/stream.h"

namespace torchrelay::net {

using Key = std::array<unsigned char, 32>;

// Makes the streams of a group. Both ends prove that they have the key, and draw a fresh one for each
// connection (ECDHE): who learns the key later cannot read what was sent before. There are no certificates,
// tickets or early data, and one cipher suite, AES-128-GCM. Thread-safe.
class Tls {
 public:
  // `library_path`: of libssl, version 3. Throws kUnavailable. Keys of a connection are replaced after
  // `rekey_bytes`, far below what is safe to encrypt with one.
  Tls(const std::string& library_path, const Key& key, std::size_t rekey_bytes = std::size_t{64} << 30);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  // `name` is that of the end that accepts; both must give the same, so that nobody in between can connect
  // a process to another one than it wants.
  std::unique_ptr<Stream> open(Descriptor socket, bool connects, std::string name) const;

  struct Context;

 private:
  std::shared_ptr<const Context> context_;
};

// Encrypted by `tls`, unless it is null.
std::unique_ptr<Stream> open_stream(const Tls* tls, Descriptor socket, bool connects, std::string name);

}  // namespace torchrelay::net
