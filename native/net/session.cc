#include "net/session.h"

namespace torchrelay {

bool equal(const SessionToken& a, const SessionToken& b) noexcept {
  unsigned char difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    difference = static_cast<unsigned char>(difference | (a[i] ^ b[i]));
  return difference == 0;
}

}  // namespace torchrelay
