#include "cuda/backward.cuh"

template cudaError_t automodel::cuda::launch_backward_as<float>(const numerics::BackwardParams&,
                                                                const BackwardPlan&, cudaStream_t);
