// The CUDA kernels, as the op calls them. Pointers are device pointers of the current device; work
// goes to the stream; an error of a launch is returned, never swallowed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "numerics/params.h"

namespace automodel::cuda {

cudaError_t launch_forward(const numerics::ForwardParams& params, cudaStream_t stream);

// The units of params.partials on the current device; needs everything in params but these two.
// Which they are does not change a bit.
numerics::Units choose_units(const numerics::BackwardParams& params);

// grad_x and grad_weight, those that are not null; with units from choose_units.
cudaError_t launch_backward(const numerics::BackwardParams& params, cudaStream_t stream);

struct BackwardPlan;

// The same for one x dtype, instantiated in a file each so that they compile side by side.
template <class X>
cudaError_t launch_forward_as(const numerics::ForwardParams& params, cudaStream_t stream);
template <class X>
cudaError_t launch_backward_as(const numerics::BackwardParams& params, const BackwardPlan& plan,
                               cudaStream_t stream);

// grad_weight from the partial sums of several units.
cudaError_t launch_join_partials(const numerics::BackwardParams& params, cudaStream_t stream);

}  // namespace automodel::cuda
