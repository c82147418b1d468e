#define AUTOMODEL_CPU_KERNELS kNeonKernels
#include "cpu/level.h"
