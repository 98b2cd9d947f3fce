#define TORCHRELAY_ISA avx512
#include "core/compression_kernels.h"
#include "core/reduce_kernels.h"
