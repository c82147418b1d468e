// automodel::rms_norm for C++ programs. Header-only: it finds the op in torch's dispatcher, where
// loading libautomodel_rms_norm.so puts it: dlopen that library before the first call. Python's
// automodel_rms_norm.build_info()["library"] is its path.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <optional>

namespace automodel {

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
// Returns y, contiguous, of x's shape and dtype; differentiable once with respect to x and weight.
// The bits are those of the numerics contract, the same as from Python. Throws c10::Error.
inline at::Tensor rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps,
                           bool zero_centered_gamma = false) {
  using Signature = at::Tensor(const at::Tensor&, const std::optional<at::Tensor>&, double, bool);
  static const auto op = [] {
    const auto found = c10::Dispatcher::singleton().findSchema({"automodel::rms_norm", ""});
    TORCH_CHECK(found.has_value(),
                "automodel::rms_norm is not registered: load libautomodel_rms_norm.so first");
    return found->typed<Signature>();
  }();
  return op.call(x, weight, eps, zero_centered_gamma);
}

}  // namespace automodel
