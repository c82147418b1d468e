// The forward ops under autograd: their forward op now, a backward op later, both through the
// dispatcher, so that every tracer sees these ops alone.
#include <torch/library.h>

#include "op/calls.h"
#include "op/checks.h"
#include "op/derivatives.h"
#include "op/node.h"

namespace automodel::op {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Takes the gradients of y, with a residual of sum, and of rstd; gives those of x, residual and
// weight. The gradient of sum is added in the kernel, and x and residual get one tensor.
struct RmsNormBackward : NamedNode {
  SavedVariable normalised;  // x, or the sum
  SavedVariable weight;
  SavedVariable rstd;
  bool has_weight = false;
  bool has_residual = false;
  bool zero_centered_gamma = false;

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);  // against release_variables in another thread
    // Where no gradient flows to x, neither sum nor rstd has a history.
    grads.resize(has_residual ? 3 : 2);
    const at::Tensor& grad_y = grads.front();
    const at::Tensor& grad_rstd = grads.back();
    const at::Tensor grad_sum = has_residual ? grads[1] : at::Tensor();
    const bool want_x = task_should_compute_output(0);
    const bool want_residual = task_should_compute_output(1);
    const std::array<bool, 2> mask = {want_x || want_residual,
                                      has_weight && task_should_compute_output(2)};
    at::Tensor grad = grad_sum;
    at::Tensor grad_weight;
    if ((grad_y.defined() || grad_rstd.defined()) && (mask[0] || mask[1])) {
      const Point at = point();
      if (grad_y.defined()) {
        const OptionalTensor gain = or_nullopt(at.weight);
        std::tie(grad, grad_weight) =
            mask[0] && grad_sum.defined()
                ? call_add_backward(grad_y, grad_sum, at.x, gain, at.rstd, zero_centered_gamma,
                                    mask)
                : call_backward(grad_y, at.x, gain, at.rstd, zero_centered_gamma, mask);
      }
      if (mask[0] && grad_rstd.defined()) {
        grad = plus(grad, grad_x_of_rstd(at, grad_rstd));
      }
    }
    variable_list result(3);
    if (want_x) result[0] = grad;
    if (want_residual) result[1] = grad;
    if (mask[1]) result[2] = grad_weight;
    return result;
  }

  Point point() {
    return {normalised.unpack(getptr()), has_weight ? weight.unpack() : at::Tensor(),
            rstd.unpack(getptr()), zero_centered_gamma};
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    normalised.reset_data();
    weight.reset_data();
    rstd.reset_data();
  }
};

struct Forward {
  at::Tensor y;
  at::Tensor sum;  // undefined without a residual
  at::Tensor rstd;
};

// y, sum and rstd with their derivatives, reverse and forward. residual is undefined without one.
Forward forward(const at::Tensor& x, const at::Tensor& residual, const OptionalTensor& weight,
                double eps, bool zero_centered_gamma) {
  const at::Tensor gain = or_undefined(weight);
  const bool rows_need_grad = torch::autograd::compute_requires_grad(x, residual);
  decltype(make_node<RmsNormBackward>()) node;
  if (rows_need_grad || torch::autograd::compute_requires_grad(gain)) {
    node = make_node<RmsNormBackward>();
    node->title = residual.defined() ? "AutomodelAddRmsNormBackward" : "AutomodelRmsNormBackward";
    node->has_weight = gain.defined();
    node->has_residual = residual.defined();
    node->zero_centered_gamma = zero_centered_gamma;
    node->set_next_edges(torch::autograd::collect_next_edges(x, residual, gain));
  }
  Forward out;
  below_autograd([&] {
    if (residual.defined()) {
      std::tie(out.y, out.sum, out.rstd) =
          call_add_forward(x, residual, weight, eps, zero_centered_gamma);
    } else {
      std::tie(out.y, out.rstd) = call_forward(x, weight, eps, zero_centered_gamma);
    }
  });
  const at::Tensor& rows = residual.defined() ? out.sum : x;
  if (node) {
    torch::autograd::set_history(out.y, node);
    if (rows_need_grad) {
      if (residual.defined()) torch::autograd::set_history(out.sum, node);
      torch::autograd::set_history(out.rstd, node);
    }
  }
  if (any_tangent(x, residual, gain)) {
    const at::Tensor tangent = plus(tangent_of(x), tangent_of(residual));
    const Point at{primal_of(rows), primal_of(gain), out.rstd, zero_centered_gamma};
    const ForwardTangents tangents = forward_tangents(at, tangent, tangent_of(gain));
    set_tangent(out.y, tangents.y);
    set_tangent(out.rstd, tangents.rstd);
    if (residual.defined()) set_tangent(out.sum, tangent);
  }
  if (node) {
    node->normalised = SavedVariable(rows, residual.defined() && rows_need_grad);
    if (gain.defined()) node->weight = SavedVariable(gain, /*is_output=*/false);
    node->rstd = SavedVariable(out.rstd, /*is_output=*/rows_need_grad);
  }
  return out;
}

at::Tensor rms_norm(const at::Tensor& x, const OptionalTensor& weight, double eps,
                    bool zero_centered_gamma) {
  if (!torch::autograd::compute_requires_grad(x, weight) && !any_tangent(x, weight)) {
    return below_autograd([&] { return call_rms_norm(x, weight, eps, zero_centered_gamma); });
  }
  check_forward("rms_norm", x, weight, eps);  // or the message would name rms_norm_forward
  return forward(x, {}, weight, eps, zero_centered_gamma).y;
}

std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& x,
                                                    const OptionalTensor& weight, double eps,
                                                    bool zero_centered_gamma) {
  const Forward out = forward(x, {}, weight, eps, zero_centered_gamma);
  return {out.y, out.rstd};
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                const OptionalTensor& weight, double eps,
                                                bool zero_centered_gamma) {
  if (!torch::autograd::compute_requires_grad(x, residual, weight) &&
      !any_tangent(x, residual, weight)) {
    return below_autograd(
        [&] { return call_add_rms_norm(x, residual, weight, eps, zero_centered_gamma); });
  }
  check_add_forward("add_rms_norm", x, residual, weight, eps);
  const Forward out = forward(x, residual, weight, eps, zero_centered_gamma);
  return {out.y, out.sum};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm_forward(const at::Tensor& x,
                                                                    const at::Tensor& residual,
                                                                    const OptionalTensor& weight,
                                                                    double eps,
                                                                    bool zero_centered_gamma) {
  const Forward out = forward(x, residual, weight, eps, zero_centered_gamma);
  return {out.y, out.sum, out.rstd};
}

}  // namespace

TORCH_LIBRARY_IMPL(automodel, Autograd, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("rms_norm_forward", rms_norm_forward);
  m.impl("add_rms_norm", add_rms_norm);
  m.impl("add_rms_norm_forward", add_rms_norm_forward);
}

}  // namespace automodel::op
