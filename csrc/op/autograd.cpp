// rms_norm under autograd: rms_norm_forward now, rms_norm_backward later, both through the
// dispatcher, so that every tracer sees these ops alone. A hand-written node, as ATen's generated
// code uses, because torch::autograd::Function refuses torch.func transforms.
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include "op/calls.h"
#include "op/checks.h"

namespace automodel::op {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

struct RmsNormBackward : torch::autograd::Node {
  SavedVariable x;
  SavedVariable weight;
  SavedVariable rstd;
  bool has_weight = false;
  bool zero_centered_gamma = false;

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);  // against release_variables in another thread
    const at::Tensor& grad_y = grads[0];
    const std::array<bool, 2> mask = {task_should_compute_output(0),
                                      has_weight && task_should_compute_output(1)};
    variable_list result(2);
    if (!grad_y.defined() || !(mask[0] || mask[1])) return result;
    const OptionalTensor gain = has_weight ? OptionalTensor(weight.unpack()) : std::nullopt;
    auto [grad_x, grad_weight] =
        call_backward(grad_y, x.unpack(), gain, rstd.unpack(), zero_centered_gamma, mask);
    if (mask[0]) result[0] = std::move(grad_x);
    if (mask[1]) result[1] = std::move(grad_weight);
    return result;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    x.reset_data();
    weight.reset_data();
    rstd.reset_data();
  }

  std::string name() const override { return "AutomodelRmsNormBackward"; }
};

// Older torch owns nodes by std::shared_ptr, later ones by c10::intrusive_ptr.
template <class T>
auto make_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, T>) {
    return c10::make_intrusive<T>();
  } else {
    return std::shared_ptr<T>(new T(), [](auto* node) { deleteNode(node); });
  }
}

void check_no_forward_gradient(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::isFwGradDefined(tensor),
                              "automodel::rms_norm: forward-mode AD is not implemented, and ", name,
                              " carries a tangent");
}

at::Tensor rms_norm(const at::Tensor& x, const OptionalTensor& weight, double eps,
                    bool zero_centered_gamma) {
  check_no_forward_gradient("x", x);
  if (weight.has_value()) check_no_forward_gradient("weight", *weight);

  const bool needs_grad = torch::autograd::compute_requires_grad(x, weight);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!needs_grad) return call_rms_norm(x, weight, eps, zero_centered_gamma);

  check_forward("rms_norm", x, weight, eps);  // or the message would name rms_norm_forward
  auto node = make_node<RmsNormBackward>();
  node->set_next_edges(
      torch::autograd::collect_next_edges(x, weight.has_value() ? *weight : at::Tensor()));
  auto [y, rstd] = call_forward(x, weight, eps, zero_centered_gamma);
  node->x = SavedVariable(x, /*is_output=*/false);
  node->has_weight = weight.has_value();
  if (node->has_weight) node->weight = SavedVariable(*weight, /*is_output=*/false);
  node->rstd = SavedVariable(rstd, /*is_output=*/false);
  node->zero_centered_gamma = zero_centered_gamma;
  torch::autograd::set_history(y, node);
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(automodel, Autograd, m) {
  m.impl("rms_norm", rms_norm);
  // Differentiating the inner ops, which is how a second derivative arrives here, raises with the
  // op's name when the derivative is used.
  m.impl("rms_norm_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("rms_norm_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace automodel::op
