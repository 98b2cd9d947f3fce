#define TORCHRELAY_ISA baseline
#include "compression_kernels.h"
#include "reduce_kernels.h"
