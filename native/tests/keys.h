// Encryption for tests. The program's environment may name libssl (TORCHRELAY_LIBSSL).
#pragma once

#include <cstdlib>
#include <memory>

#include "net/tls.h"

namespace torchrelay::testing {

inline const char* libssl() {
  const char* path = std::getenv("TORCHRELAY_LIBSSL");
  return path == nullptr ? "libssl.so.3" : path;
}

inline std::shared_ptr<const net::Tls> encryption(unsigned char fill) {
  net::Key key;
  key.fill(fill);
  return std::make_shared<const net::Tls>(libssl(), key);
}

}  // namespace torchrelay::testing
