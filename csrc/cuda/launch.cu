#include "cuda/launch.h"
#include "cuda/unit.h"
#include "numerics/dispatch.h"

namespace automodel::cuda {

cudaError_t launch_forward(const numerics::ForwardParams& params, cudaStream_t stream) {
  return numerics::visit_x(params.x_dtype, [&](auto x) {
    return launch_forward_as<typename decltype(x)::type>(params, stream);
  });
}

static cudaError_t launch_backward_rows(const numerics::BackwardParams& params,
                                        cudaStream_t stream) {
  return numerics::visit_x(params.x_dtype, [&](auto x) {
    return launch_backward_rows_as<typename decltype(x)::type>(params, stream);
  });
}

int64_t choose_unit_leaves(const numerics::BackwardParams& params, int multiprocessors) {
  const int64_t leaves = numerics::leaves_in(params.rows);
  const int64_t blocks = int64_t{kBlocksPerMultiprocessor} * multiprocessors;
  if (!backward_is_fused(params)) {
    const int64_t columns = columns_blocks(params.hidden);
    int64_t unit = 1;
    while (unit < kMaxColumnsLeaves && leaves / (2 * unit) * columns >= blocks) unit *= 2;
    return unit;
  }
  const int64_t slices = fused_slices(params.hidden);
  int64_t slice = 1;
  const auto fits = [&](int64_t slice_leaves) {
    return fused_stack_elements(params.hidden, fused_chunks(params.hidden), slices * slice_leaves) *
               int64_t{sizeof(float)} <=
           kMaxStackBytes;
  };
  while (slice < kMaxSliceLeaves && leaves / (2 * slice * slices) >= blocks && fits(2 * slice)) {
    slice *= 2;
  }
  return slice * slices;
}

cudaError_t launch_backward(const numerics::BackwardParams& params, cudaStream_t stream) {
  if (params.grad_x != nullptr) {
    const cudaError_t error = launch_backward_rows(params, stream);
    if (error != cudaSuccess) return error;
  }
  if (params.grad_weight == nullptr) return cudaSuccess;
  if (!backward_is_fused(params)) {
    const cudaError_t error = launch_columns(params, stream);
    if (error != cudaSuccess) return error;
  }
  return launch_join_partials(params, stream);
}

}  // namespace automodel::cuda
