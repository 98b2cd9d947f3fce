#include "parameters/wire.h"

#include "core/error.h"

namespace torchrelay::parameters {

void Reader::throw_short(std::size_t missing_bytes) {
  throw Error(Code::kProtocol,
              "parameters: a message ends " + std::to_string(missing_bytes) + " bytes too early");
}

}  // namespace torchrelay::parameters
