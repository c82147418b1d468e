// The ops, called through the dispatcher.
#pragma once

#include <array>
#include <tuple>

#include "op/checks.h"

namespace automodel::op {

at::Tensor call_rms_norm(const at::Tensor& x, const OptionalTensor& weight, double eps,
                         bool zero_centered_gamma);
std::tuple<at::Tensor, at::Tensor> call_forward(const at::Tensor& x, const OptionalTensor& weight,
                                                double eps, bool zero_centered_gamma);
std::tuple<at::Tensor, at::Tensor> call_backward(const at::Tensor& grad_y, const at::Tensor& x,
                                                 const OptionalTensor& weight,
                                                 const at::Tensor& rstd, bool zero_centered_gamma,
                                                 std::array<bool, 2> output_mask);

std::tuple<at::Tensor, at::Tensor> call_add_rms_norm(const at::Tensor& x,
                                                     const at::Tensor& residual,
                                                     const OptionalTensor& weight, double eps,
                                                     bool zero_centered_gamma);
std::tuple<at::Tensor, at::Tensor, at::Tensor> call_add_forward(const at::Tensor& x,
                                                                const at::Tensor& residual,
                                                                const OptionalTensor& weight,
                                                                double eps,
                                                                bool zero_centered_gamma);
std::tuple<at::Tensor, at::Tensor> call_add_backward(
    const at::Tensor& grad_y, const at::Tensor& grad_sum, const at::Tensor& sum,
    const OptionalTensor& weight, const at::Tensor& rstd, bool zero_centered_gamma,
    std::array<bool, 2> output_mask);

}  // namespace automodel::op
