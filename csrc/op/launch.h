// The ops on a device, written once: checks, outputs, params. A device supplies how kernels
// are run:
//
//   struct Device {
//     explicit Device(const at::Tensor& x);              // makes x's device current while it lives
//     void forward(const numerics::ForwardParams&);
//     numerics::Units units(const numerics::BackwardParams&);  // how it cuts grad_weight's rows
//     void backward(const numerics::BackwardParams&);
//   };
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "numerics/params.h"
#include "numerics/spec.h"
#include "op/checks.h"
#include "op/outputs.h"
#include "op/rows.h"

namespace automodel::op {

template <class Device>
struct Ops {
  static at::Tensor rms_norm(const at::Tensor& x, const OptionalTensor& weight, double eps,
                             bool zero_centered_gamma) {
    check_forward("rms_norm", x, weight, eps);
    at::Tensor y = new_like_x(x);
    forward(x, {}, weight, eps, zero_centered_gamma, y, {}, {});
    return y;
  }

  static std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& x,
                                                             const OptionalTensor& weight,
                                                             double eps, bool zero_centered_gamma) {
    check_forward("rms_norm_forward", x, weight, eps);
    at::Tensor y = new_like_x(x);
    at::Tensor rstd = new_rstd(x);
    forward(x, {}, weight, eps, zero_centered_gamma, y, {}, rstd);
    return {std::move(y), std::move(rstd)};
  }

  static std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
      const at::Tensor& grad_y, const at::Tensor& x, const OptionalTensor& weight,
      const at::Tensor& rstd, bool zero_centered_gamma, std::array<bool, 2> output_mask) {
    check_backward(grad_y, x, weight, rstd, output_mask);
    return backward(grad_y, {}, x, weight, rstd, zero_centered_gamma, output_mask);
  }

  static std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x,
                                                         const at::Tensor& residual,
                                                         const OptionalTensor& weight, double eps,
                                                         bool zero_centered_gamma) {
    check_add_forward("add_rms_norm", x, residual, weight, eps);
    at::Tensor y = new_like_x(x);
    at::Tensor sum = new_like_x(x);
    forward(x, residual, weight, eps, zero_centered_gamma, y, sum, {});
    return {std::move(y), std::move(sum)};
  }

  static std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm_forward(
      const at::Tensor& x, const at::Tensor& residual, const OptionalTensor& weight, double eps,
      bool zero_centered_gamma) {
    check_add_forward("add_rms_norm_forward", x, residual, weight, eps);
    at::Tensor y = new_like_x(x);
    at::Tensor sum = new_like_x(x);
    at::Tensor rstd = new_rstd(x);
    forward(x, residual, weight, eps, zero_centered_gamma, y, sum, rstd);
    return {std::move(y), std::move(sum), std::move(rstd)};
  }

  static std::tuple<at::Tensor, at::Tensor> add_rms_norm_backward(
      const at::Tensor& grad_y, const at::Tensor& grad_sum, const at::Tensor& sum,
      const OptionalTensor& weight, const at::Tensor& rstd, bool zero_centered_gamma,
      std::array<bool, 2> output_mask) {
    check_add_backward(grad_y, grad_sum, sum, weight, rstd, output_mask);
    return backward(grad_y, grad_sum, sum, weight, rstd, zero_centered_gamma, output_mask);
  }

  static void register_in(torch::Library& library) {
    library.impl("rms_norm", rms_norm);
    library.impl("rms_norm_forward", rms_norm_forward);
    library.impl("rms_norm_backward", rms_norm_backward);
    library.impl("add_rms_norm", add_rms_norm);
    library.impl("add_rms_norm_forward", add_rms_norm_forward);
    library.impl("add_rms_norm_backward", add_rms_norm_backward);
  }

 private:
  static at::Tensor contiguous_weight(const OptionalTensor& weight) {
    return weight.has_value() ? weight->contiguous() : at::Tensor();
  }

  static void* data_or_null(const at::Tensor& tensor) {
    return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
  }

  // residual and sum are both undefined or neither; rstd is undefined where nobody asked for it.
  static void forward(const at::Tensor& x, const at::Tensor& residual, const OptionalTensor& weight,
                      double eps, bool zero_centered_gamma, const at::Tensor& y,
                      const at::Tensor& sum, const at::Tensor& rstd) {
    if (x.numel() == 0) return;
    const Rows x_rows = as_rows(x);
    const Rows residual_rows = as_rows(residual);
    const at::Tensor gain = contiguous_weight(weight);
    numerics::ForwardParams params{};
    params.x = x_rows.data();
    params.x_layout = x_rows.layout;
    params.residual = residual_rows.data();
    params.residual_layout = residual_rows.layout;
    params.weight = gain.defined() ? gain.const_data_ptr() : nullptr;
    params.y = y.mutable_data_ptr();
    params.sum = data_or_null(sum);
    params.rstd = data_or_null(rstd);
    params.hidden = x.size(-1);
    params.rows = x.numel() / params.hidden;
    params.eps = eps;
    params.x_dtype = dtype_of(x);
    params.weight_dtype = gain.defined() ? dtype_of(gain) : numerics::DType::kNone;
    params.zero_centered_gamma = zero_centered_gamma;
    Device(x).forward(params);
  }

  // x is what was normalised: with a residual the sum. grad_sum is undefined without one.
  static std::tuple<at::Tensor, at::Tensor> backward(
      const at::Tensor& grad_y, const at::Tensor& grad_sum, const at::Tensor& x,
      const OptionalTensor& weight, const at::Tensor& rstd, bool zero_centered_gamma,
      std::array<bool, 2> output_mask) {
    at::Tensor grad_x = new_grad_x(x, output_mask[0]);
    at::Tensor grad_weight = new_grad_weight(x, weight, output_mask[1]);
    if (x.numel() == 0) {
      if (output_mask[1]) grad_weight.zero_();
      return {std::move(grad_x), std::move(grad_weight)};
    }
    if (!output_mask[0] && !output_mask[1]) return {std::move(grad_x), std::move(grad_weight)};

    const Rows x_rows = as_rows(x);
    const Rows grad_y_rows = as_rows(grad_y);
    const Rows grad_sum_rows = as_rows(output_mask[0] ? grad_sum : at::Tensor());
    const at::Tensor gain = contiguous_weight(weight);
    const at::Tensor rstd_rows = rstd.contiguous();
    numerics::BackwardParams params{};
    params.grad_y = grad_y_rows.data();
    params.grad_y_layout = grad_y_rows.layout;
    params.grad_sum = grad_sum_rows.data();
    params.grad_sum_layout = grad_sum_rows.layout;
    params.x = x_rows.data();
    params.x_layout = x_rows.layout;
    params.weight = gain.defined() ? gain.const_data_ptr() : nullptr;
    params.rstd = rstd_rows.const_data_ptr();
    params.grad_x = output_mask[0] ? grad_x.mutable_data_ptr() : nullptr;
    params.grad_weight = output_mask[1] ? grad_weight.mutable_data_ptr() : nullptr;
    params.rows = rstd.numel();
    params.hidden = x.size(-1);
    params.x_dtype = dtype_of(x);
    params.weight_dtype = gain.defined() ? dtype_of(gain) : numerics::DType::kNone;
    params.zero_centered_gamma = zero_centered_gamma;

    Device device(x);  // before the allocations below
    params.units = device.units(params);
    at::Tensor partials;
    if (output_mask[1]) {
      partials = at::empty({params.units.count, params.hidden}, rstd.options());
      params.partials = partials.mutable_data_ptr();
    }
    device.backward(params);
    return {std::move(grad_x), std::move(grad_weight)};
  }
};

}  // namespace automodel::op
