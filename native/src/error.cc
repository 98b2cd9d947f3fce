#include "torchrelay/error.h"

#include <cerrno>
#include <system_error>

namespace torchrelay {

std::string with_errno(const std::string& message) {
  return message + ": " + std::generic_category().message(errno);
}

}  // namespace torchrelay
