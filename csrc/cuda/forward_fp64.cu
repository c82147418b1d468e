#include "cuda/forward.cuh"

template cudaError_t automodel::cuda::launch_forward_as<double>(const numerics::ForwardParams&,
                                                                cudaStream_t);
