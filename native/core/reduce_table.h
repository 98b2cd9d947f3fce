// What each instruction set's copy of the kernels provides. kernel() gives nullptr where op does not fit
// dtype.
#pragma once

#include "core/reduce.h"

namespace torchrelay {

namespace baseline {
Kernel kernel(Dtype dtype, Op op);
}
namespace avx2 {
Kernel kernel(Dtype dtype, Op op);
}
namespace avx512 {
Kernel kernel(Dtype dtype, Op op);
}

}  // namespace torchrelay
