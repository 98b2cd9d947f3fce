#define TORCHRELAY_ISA avx512
#include "compression_kernels.h"
#include "reduce_kernels.h"
