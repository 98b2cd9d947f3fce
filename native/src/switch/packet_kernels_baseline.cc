#define TORCHRELAY_ISA baseline
#include "packet_kernels.h"
