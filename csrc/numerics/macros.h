// How the specification's functions are compiled. Every CPU instruction set compiles them again
// with other flags, so none of them may become a symbol that a linker could share between object
// files: they are static and always inlined.
#pragma once

#if defined(__FAST_MATH__)
#error "automodel-rms-norm: the contract forbids -ffast-math; build without it"
#endif

#if defined(__CUDACC__)
#define AUTOMODEL_NUMERICS static __host__ __device__ __forceinline__
#else
#define AUTOMODEL_NUMERICS static inline __attribute__((always_inline))
#endif
