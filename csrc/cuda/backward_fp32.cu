#include "cuda/backward.cuh"

template cudaError_t automodel::cuda::launch_backward_rows_as<float>(
    const numerics::BackwardParams&, cudaStream_t);
