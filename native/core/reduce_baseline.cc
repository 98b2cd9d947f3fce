#define TORCHRELAY_ISA baseline
#include "core/compression_kernels.h"
#include "core/reduce_kernels.h"
