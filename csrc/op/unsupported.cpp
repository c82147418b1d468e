// Every backend without kernels of its own: sparse and quantised tensors, other accelerators, and
// CUDA in a CPU-only build.
#include <torch/library.h>

#include "op/checks.h"

namespace automodel::op {
namespace {

// What the checks let pass here is a good call on a device without kernels.
[[noreturn]] void refuse(const char* op, const at::Tensor& x, const char* name = "x") {
  TORCH_CHECK_NOT_IMPLEMENTED(!x.is_cuda(), op, ": ", name, " is on ", x.device(),
                              ", but this automodel-rms-norm was built without CUDA kernels; "
                              "install it again where nvcc of torch's CUDA version is found, with "
                              "AUTOMODEL_RMS_NORM_CUDA=ON to see what is missing");
  TORCH_CHECK_NOT_IMPLEMENTED(false, op, ": ", name, " must be on a cpu or cuda device, got ",
                              x.device());
}

at::Tensor rms_norm(const at::Tensor& x, const OptionalTensor& weight, double eps, bool) {
  check_forward("rms_norm", x, weight, eps);
  refuse("rms_norm", x);
}

std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& x,
                                                    const OptionalTensor& weight, double eps,
                                                    bool) {
  check_forward("rms_norm_forward", x, weight, eps);
  refuse("rms_norm_forward", x);
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad_y, const at::Tensor& x,
                                                     const OptionalTensor& weight,
                                                     const at::Tensor& rstd, bool,
                                                     std::array<bool, 2> output_mask) {
  check_backward(grad_y, x, weight, rstd, output_mask);
  refuse("rms_norm_backward", x);
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                const OptionalTensor& weight, double eps, bool) {
  check_add_forward("add_rms_norm", x, residual, weight, eps);
  refuse("add_rms_norm", x);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm_forward(const at::Tensor& x,
                                                                    const at::Tensor& residual,
                                                                    const OptionalTensor& weight,
                                                                    double eps, bool) {
  check_add_forward("add_rms_norm_forward", x, residual, weight, eps);
  refuse("add_rms_norm_forward", x);
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm_backward(
    const at::Tensor& grad_y, const at::Tensor& grad_sum, const at::Tensor& sum,
    const OptionalTensor& weight, const at::Tensor& rstd, bool, std::array<bool, 2> output_mask) {
  check_add_backward(grad_y, grad_sum, sum, weight, rstd, output_mask);
  refuse("add_rms_norm_backward", sum, "sum");
}

void register_in(torch::Library& library) {
  library.impl("rms_norm", rms_norm);
  library.impl("rms_norm_forward", rms_norm_forward);
  library.impl("rms_norm_backward", rms_norm_backward);
  library.impl("add_rms_norm", add_rms_norm);
  library.impl("add_rms_norm_forward", add_rms_norm_forward);
  library.impl("add_rms_norm_backward", add_rms_norm_backward);
}

}  // namespace

TORCH_LIBRARY_IMPL(automodel, CompositeExplicitAutograd, m) { register_in(m); }

// The alias above leaves nested tensors out.
TORCH_LIBRARY_IMPL(automodel, NestedTensorCPU, m) { register_in(m); }
TORCH_LIBRARY_IMPL(automodel, NestedTensorCUDA, m) { register_in(m); }

}  // namespace automodel::op
