// Encryption for tests. The program's environment may name libssl (TORCHRELAY_LIBSSL).
#pragma once

#include <cstdlib>
#include <memory>

#include "torchrelay/transport/tls.h"

namespace torchrelay::testing {

inline const char* libssl() {
  const char* path = std::getenv("TORCHRELAY_LIBSSL");
  return path == nullptr ? "libssl.so.3" : path;
}

inline std::shared_ptr<const transport::Tls> encryption(unsigned char fill) {
  transport::Key key;
  key.fill(fill);
  return std::make_shared<const transport::Tls>(libssl(), key);
}

}  // namespace torchrelay::testing
