#include "cuda/backward.cuh"

template cudaError_t automodel::cuda::launch_backward_rows_as<double>(
    const numerics::BackwardParams&, cudaStream_t);
