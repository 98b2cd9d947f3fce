#define TORCHRELAY_ISA avx2
#include "core/compression_kernels.h"
#include "core/reduce_kernels.h"
