#define TORCHRELAY_ISA avx2
#include "packet_kernels.h"
