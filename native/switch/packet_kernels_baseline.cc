#define TORCHRELAY_ISA baseline
#include "switch/packet_kernels.h"
