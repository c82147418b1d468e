// The backward ops under autograd: second derivatives, and forward-mode AD of gradients.
#include <torch/library.h>

#include "op/calls.h"
#include "op/derivatives.h"
#include "op/node.h"

namespace automodel::op {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Takes the gradients of grad_x and grad_weight, of those that were computed; gives those of
// grad_y, grad_sum, x, weight and rstd.
struct SecondBackward : NamedNode {
  SavedVariable grad_y;
  SavedVariable x;
  SavedVariable weight;
  SavedVariable rstd;
  bool has_weight = false;
  bool zero_centered_gamma = false;
  std::array<bool, 2> mask{};

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const at::Tensor of_grad_x = mask[0] ? grads.front() : at::Tensor();
    const at::Tensor of_grad_weight = mask[1] ? grads.back() : at::Tensor();
    if (!of_grad_x.defined() && !of_grad_weight.defined()) return variable_list(5);
    const Point at{x.unpack(), has_weight ? weight.unpack() : at::Tensor(), rstd.unpack(),
                   zero_centered_gamma};
    const SecondGradients second = second_gradients(at, grad_y.unpack(), of_grad_x, of_grad_weight);
    return {second.grad_y, of_grad_x, second.x, second.weight, second.rstd};
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    grad_y.reset_data();
    x.reset_data();
    weight.reset_data();
    rstd.reset_data();
  }
};

// grad_sum is undefined without one.
std::tuple<at::Tensor, at::Tensor> backward(const at::Tensor& grad_y, const at::Tensor& grad_sum,
                                            const at::Tensor& x, const OptionalTensor& weight,
                                            const at::Tensor& rstd, bool zero_centered_gamma,
                                            std::array<bool, 2> mask) {
  std::tuple<at::Tensor, at::Tensor> out = below_autograd([&] {
    return grad_sum.defined()
               ? call_add_backward(grad_y, grad_sum, x, weight, rstd, zero_centered_gamma, mask)
               : call_backward(grad_y, x, weight, rstd, zero_centered_gamma, mask);
  });
  const auto& [grad_x, grad_weight] = out;
  const at::Tensor gain = or_undefined(weight);
  if (torch::autograd::compute_requires_grad(grad_y, grad_sum, x, gain, rstd)) {
    const auto node = make_node<SecondBackward>();
    node->title = grad_sum.defined() ? "AutomodelAddRmsNormBackwardBackward"
                                     : "AutomodelRmsNormBackwardBackward";
    node->has_weight = gain.defined();
    node->zero_centered_gamma = zero_centered_gamma;
    node->mask = mask;
    node->set_next_edges(torch::autograd::collect_next_edges(grad_y, grad_sum, x, gain, rstd));
    if (mask[0]) torch::autograd::set_history(grad_x, node);
    if (mask[1]) torch::autograd::set_history(grad_weight, node);
    node->grad_y = SavedVariable(grad_y, /*is_output=*/false);
    node->x = SavedVariable(x, /*is_output=*/false);
    if (gain.defined()) node->weight = SavedVariable(gain, /*is_output=*/false);
    node->rstd = SavedVariable(rstd, /*is_output=*/false);
  }
  if (any_tangent(grad_y, grad_sum, x, gain, rstd)) {
    const Point at{primal_of(x), primal_of(gain), primal_of(rstd), zero_centered_gamma};
    const Point tangents{tangent_of(x), tangent_of(gain), tangent_of(rstd), zero_centered_gamma};
    const BackwardTangents of =
        backward_tangents(at, primal_of(grad_y), tangents, tangent_of(grad_y));
    if (mask[0]) set_tangent(grad_x, plus(of.grad_x, tangent_of(grad_sum)));
    if (mask[1]) set_tangent(grad_weight, of.grad_weight);
  }
  return out;
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad_y, const at::Tensor& x,
                                                     const OptionalTensor& weight,
                                                     const at::Tensor& rstd,
                                                     bool zero_centered_gamma,
                                                     std::array<bool, 2> output_mask) {
  return backward(grad_y, {}, x, weight, rstd, zero_centered_gamma, output_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(automodel, Autograd, m) {
  m.impl("rms_norm_backward", rms_norm_backward);
  m.impl("add_rms_norm_backward", backward);
}

}  // namespace automodel::op
