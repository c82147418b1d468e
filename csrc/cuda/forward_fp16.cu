#include "cuda/forward.cuh"

template cudaError_t automodel::cuda::launch_forward_as<automodel::numerics::Float16>(
    const numerics::ForwardParams&, cudaStream_t);
