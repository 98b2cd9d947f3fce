#define TORCHRELAY_ISA avx2
#include "compression_kernels.h"
#include "reduce_kernels.h"
