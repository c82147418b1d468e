#define AUTOMODEL_CPU_KERNELS kScalarKernels
#include "cpu/level.h"
