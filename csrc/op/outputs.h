// The outputs of the ops, the same on every device and on Meta: contiguous, and an empty tensor
// (0,) for a gradient that nobody asked for.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "op/checks.h"

namespace automodel::op {

inline at::Tensor new_like_x(const at::Tensor& x) {
  return at::empty_symint(x.sym_sizes(), x.options());
}

inline at::Tensor new_rstd(const at::Tensor& x) {
  return at::empty_symint(x.sym_sizes().slice(0, x.dim() - 1),
                          x.options().dtype(accumulate_type(x.scalar_type())));
}

inline at::Tensor new_grad_x(const at::Tensor& x, bool wanted) {
  return wanted ? new_like_x(x) : at::empty({0}, x.options());
}

inline at::Tensor new_grad_weight(const at::Tensor& x, const OptionalTensor& weight, bool wanted) {
  return wanted ? at::empty_symint(weight->sym_sizes(), weight->options())
                : at::empty({0}, weight.has_value() ? weight->options() : x.options());
}

}  // namespace automodel::op
