#define TORCHRELAY_ISA avx2
#include "switch/packet_kernels.h"
