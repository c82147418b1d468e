// Every check of an argument, for all devices and for Meta, where sizes are symbols.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

namespace automodel::op {

using OptionalTensor = std::optional<at::Tensor>;

// The type A of the contract: rstd's, and the one that sums are made in.
at::ScalarType accumulate_type(at::ScalarType x_type);

// Throw c10::Error with the op's name, the argument and both values.
void check_forward(const char* op, const at::Tensor& x, const OptionalTensor& weight, double eps);
void check_backward(const at::Tensor& grad_y, const at::Tensor& x, const OptionalTensor& weight,
                    const at::Tensor& rstd, std::array<bool, 2> output_mask);
void check_add_forward(const char* op, const at::Tensor& x, const at::Tensor& residual,
                       const OptionalTensor& weight, double eps);
void check_add_backward(const at::Tensor& grad_y, const at::Tensor& grad_sum, const at::Tensor& sum,
                        const OptionalTensor& weight, const at::Tensor& rstd,
                        std::array<bool, 2> output_mask);

}  // namespace automodel::op
