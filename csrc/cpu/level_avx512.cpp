#define AUTOMODEL_CPU_KERNELS kAvx512Kernels
#include "cpu/level.h"
