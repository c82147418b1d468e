#include "cuda/backward.cuh"

template cudaError_t automodel::cuda::launch_backward_rows_as<automodel::numerics::BFloat16>(
    const numerics::BackwardParams&, cudaStream_t);
