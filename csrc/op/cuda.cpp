#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "cuda/launch.h"
#include "op/launch.h"

namespace automodel::op {
namespace {

struct CudaDevice {
  // Without the guard a kernel for cuda:1 would be launched on the current device's stream.
  explicit CudaDevice(const at::Tensor& x)
      : guard_(x.device()), stream_(c10::cuda::getCurrentCUDAStream().stream()) {}

  void forward(const numerics::ForwardParams& params) {
    C10_CUDA_CHECK(cuda::launch_forward(params, stream_));
  }

  numerics::Units units(const numerics::BackwardParams& params) {
    return cuda::choose_units(params);
  }

  void backward(const numerics::BackwardParams& params) {
    C10_CUDA_CHECK(cuda::launch_backward(params, stream_));
  }

 private:
  c10::cuda::CUDAGuard guard_;
  cudaStream_t stream_;
};

}  // namespace

TORCH_LIBRARY_IMPL(automodel, CUDA, m) { Ops<CudaDevice>::register_in(m); }

}  // namespace automodel::op
