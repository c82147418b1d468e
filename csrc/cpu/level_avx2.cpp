#define AUTOMODEL_CPU_KERNELS kAvx2Kernels
#include "cpu/level.h"
