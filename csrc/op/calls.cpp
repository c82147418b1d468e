#include "op/calls.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace automodel::op {
namespace {

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

at::Tensor call_rms_norm(const at::Tensor& x, const OptionalTensor& weight, double eps,
                         bool zero_centered_gamma) {
  static const auto op = find<decltype(call_rms_norm)>("automodel::rms_norm");
  return op.call(x, weight, eps, zero_centered_gamma);
}

std::tuple<at::Tensor, at::Tensor> call_forward(const at::Tensor& x, const OptionalTensor& weight,
                                                double eps, bool zero_centered_gamma) {
  static const auto op = find<decltype(call_forward)>("automodel::rms_norm_forward");
  return op.call(x, weight, eps, zero_centered_gamma);
}

std::tuple<at::Tensor, at::Tensor> call_backward(const at::Tensor& grad_y, const at::Tensor& x,
                                                 const OptionalTensor& weight,
                                                 const at::Tensor& rstd, bool zero_centered_gamma,
                                                 std::array<bool, 2> output_mask) {
  static const auto op = find<decltype(call_backward)>("automodel::rms_norm_backward");
  return op.call(grad_y, x, weight, rstd, zero_centered_gamma, output_mask);
}

std::tuple<at::Tensor, at::Tensor> call_add_rms_norm(const at::Tensor& x,
                                                     const at::Tensor& residual,
                                                     const OptionalTensor& weight, double eps,
                                                     bool zero_centered_gamma) {
  static const auto op = find<decltype(call_add_rms_norm)>("automodel::add_rms_norm");
  return op.call(x, residual, weight, eps, zero_centered_gamma);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> call_add_forward(const at::Tensor& x,
                                                                const at::Tensor& residual,
                                                                const OptionalTensor& weight,
                                                                double eps,
                                                                bool zero_centered_gamma) {
  static const auto op = find<decltype(call_add_forward)>("automodel::add_rms_norm_forward");
  return op.call(x, residual, weight, eps, zero_centered_gamma);
}

std::tuple<at::Tensor, at::Tensor> call_add_backward(
    const at::Tensor& grad_y, const at::Tensor& grad_sum, const at::Tensor& sum,
    const OptionalTensor& weight, const at::Tensor& rstd, bool zero_centered_gamma,
    std::array<bool, 2> output_mask) {
  static const auto op = find<decltype(call_add_backward)>("automodel::add_rms_norm_backward");
  return op.call(grad_y, grad_sum, sum, weight, rstd, zero_centered_gamma, output_mask);
}

}  // namespace automodel::op
