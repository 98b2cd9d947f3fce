#define TORCHRELAY_ISA avx512
#include "reduce_kernels.h"
