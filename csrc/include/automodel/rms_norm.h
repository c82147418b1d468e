// automodel::rms_norm and automodel::add_rms_norm for C++ programs. Header-only: they find the ops in
// torch's dispatcher, where loading libautomodel_rms_norm.so puts them: dlopen that library before
// the first call. Python's automodel_rms_norm.build_info()["library"] is its path.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <optional>
#include <string>
#include <tuple>

namespace automodel {
namespace detail {

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const std::string& name) {
  const auto found = c10::Dispatcher::singleton().findSchema({name, ""});
  TORCH_CHECK(found.has_value(), name, " is not registered: load libautomodel_rms_norm.so first");
  return found->typed<Signature>();
}

}  // namespace detail

// RMS normalisation over the last dimension: y = x * rstd * w, rstd = 1 / sqrt(mean(x * x) + eps).
//
// x: (..., hidden), bfloat16, float16, float32 or float64, on a cpu or cuda device; any strides.
//
// weight: (hidden,) or nothing; bfloat16, float16 or float32, and float64 with float64 x.
//
// eps: finite and not negative.
//
// zero_centered_gamma: w is weight + 1, added in float32 (float64 for float64 x).
//
// Returns y, contiguous, of x's shape and dtype; differentiable with respect to x and weight.
// The bits are those of the numerics contract, the same as from Python. Throws c10::Error.
inline at::Tensor rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps,
                           bool zero_centered_gamma = false) {
  using Signature = at::Tensor(const at::Tensor&, const std::optional<at::Tensor>&, double, bool);
  static const auto op = detail::find<Signature>("automodel::rms_norm");
  return op.call(x, weight, eps, zero_centered_gamma);
}

// sum = x + residual, rounded to x's dtype, and y = rms_norm(sum, ...), in one op.
//
// residual: of x's shape, dtype and device; any strides. The rest as for rms_norm.
//
// Returns y and sum, contiguous; differentiable with respect to x, residual and weight.
inline std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x,
                                                       const at::Tensor& residual,
                                                       const std::optional<at::Tensor>& weight,
                                                       double eps,
                                                       bool zero_centered_gamma = false) {
  using Signature = std::tuple<at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool);
  static const auto op = detail::find<Signature>("automodel::add_rms_norm");
  return op.call(x, residual, weight, eps, zero_centered_gamma);
}

}  // namespace automodel
