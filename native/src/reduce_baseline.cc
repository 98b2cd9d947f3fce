#define TORCHRELAY_ISA baseline
#include "reduce_kernels.h"
