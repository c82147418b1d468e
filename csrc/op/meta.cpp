#include <torch/library.h>

#include "op/checks.h"
#include "op/outputs.h"

namespace automodel::op {
namespace {

at::Tensor rms_norm(const at::Tensor& x, const OptionalTensor& weight, double eps,
                    bool /*zero_centered_gamma*/) {
  check_forward("rms_norm", x, weight, eps);
  return new_like_x(x);
}

std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& x,
                                                    const OptionalTensor& weight, double eps,
                                                    bool /*zero_centered_gamma*/) {
  check_forward("rms_norm_forward", x, weight, eps);
  return {new_like_x(x), new_rstd(x)};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad_y, const at::Tensor& x,
                                                     const OptionalTensor& weight,
                                                     const at::Tensor& rstd,
                                                     bool /*zero_centered_gamma*/,
                                                     std::array<bool, 2> output_mask) {
  check_backward(grad_y, x, weight, rstd, output_mask);
  return {new_grad_x(x, output_mask[0]), new_grad_weight(x, weight, output_mask[1])};
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                const OptionalTensor& weight, double eps,
                                                bool /*zero_centered_gamma*/) {
  check_add_forward("add_rms_norm", x, residual, weight, eps);
  return {new_like_x(x), new_like_x(x)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm_forward(const at::Tensor& x,
                                                                    const at::Tensor& residual,
                                                                    const OptionalTensor& weight,
                                                                    double eps,
                                                                    bool /*zero_centered_gamma*/) {
  check_add_forward("add_rms_norm_forward", x, residual, weight, eps);
  return {new_like_x(x), new_like_x(x), new_rstd(x)};
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm_backward(
    const at::Tensor& grad_y, const at::Tensor& grad_sum, const at::Tensor& sum,
    const OptionalTensor& weight, const at::Tensor& rstd, bool /*zero_centered_gamma*/,
    std::array<bool, 2> output_mask) {
  check_add_backward(grad_y, grad_sum, sum, weight, rstd, output_mask);
  return {new_grad_x(sum, output_mask[0]), new_grad_weight(sum, weight, output_mask[1])};
}

}  // namespace

TORCH_LIBRARY_IMPL(automodel, Meta, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("rms_norm_forward", rms_norm_forward);
  m.impl("rms_norm_backward", rms_norm_backward);
  m.impl("add_rms_norm", add_rms_norm);
  m.impl("add_rms_norm_forward", add_rms_norm_forward);
  m.impl("add_rms_norm_backward", add_rms_norm_backward);
}

}  // namespace automodel::op
