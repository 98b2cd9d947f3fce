// The kernels of each instruction set.
#pragma once

#include "switch/kernels.h"

namespace torchrelay::switchml {

namespace baseline {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}

}  // namespace torchrelay::switchml
