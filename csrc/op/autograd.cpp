// rms_norm and add_rms_norm under autograd: their forward op now, a backward op later, both through
// the dispatcher, so that every tracer sees these ops alone. A hand-written node, as ATen's generated
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

// Of both ops: takes the gradients of y and, with a residual, of sum; gives those of x, residual
// and weight. The gradient of sum is added in the kernel, and x and residual get one tensor.
struct RmsNormBackward : torch::autograd::Node {
  SavedVariable normalised;  // x, or the sum
  SavedVariable weight;
  SavedVariable rstd;
  const char* title = "";
  bool has_weight = false;
  bool zero_centered_gamma = false;

  void save(const at::Tensor& rows, bool is_output, const OptionalTensor& gain,
            const at::Tensor& scale) {
    normalised = SavedVariable(rows, is_output);
    has_weight = gain.has_value();
    if (has_weight) weight = SavedVariable(*gain, /*is_output=*/false);
    rstd = SavedVariable(scale, /*is_output=*/false);
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);  // against release_variables in another thread
    const at::Tensor& grad_y = grads[0];
    const at::Tensor grad_sum = grads.size() > 1 ? grads[1] : at::Tensor();
    const bool want_x = task_should_compute_output(0);
    const bool want_residual = task_should_compute_output(1);
    const std::array<bool, 2> mask = {want_x || want_residual,
                                      has_weight && task_should_compute_output(2)};
    at::Tensor grad = grad_sum;
    at::Tensor grad_weight;
    if (grad_y.defined() && (mask[0] || mask[1])) {
      const at::Tensor rows = normalised.unpack(getptr());
      const OptionalTensor gain = has_weight ? OptionalTensor(weight.unpack()) : std::nullopt;
      const at::Tensor scale = rstd.unpack();
      std::tie(grad, grad_weight) =
          mask[0] && grad_sum.defined()
              ? call_add_backward(grad_y, grad_sum, rows, gain, scale, zero_centered_gamma, mask)
              : call_backward(grad_y, rows, gain, scale, zero_centered_gamma, mask);
    }
    variable_list result(3);
    if (want_x) result[0] = grad;
    if (want_residual) result[1] = grad;
    if (mask[1]) result[2] = grad_weight;
    return result;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    normalised.reset_data();
    weight.reset_data();
    rstd.reset_data();
  }

  std::string name() const override { return title; }
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

auto new_node(const char* title, const at::Tensor& x, const at::Tensor& residual,
              const OptionalTensor& weight, bool zero_centered_gamma) {
  auto node = make_node<RmsNormBackward>();
  node->title = title;
  node->zero_centered_gamma = zero_centered_gamma;
  node->set_next_edges(torch::autograd::collect_next_edges(
      x, residual, weight.has_value() ? *weight : at::Tensor()));
  return node;
}

void check_no_forward_gradient(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::isFwGradDefined(tensor), "automodel::", op,
                              ": forward-mode AD is not implemented, and ", name,
                              " carries a tangent");
}

at::Tensor rms_norm(const at::Tensor& x, const OptionalTensor& weight, double eps,
                    bool zero_centered_gamma) {
  const char* op = "rms_norm";
  check_no_forward_gradient(op, "x", x);
  if (weight.has_value()) check_no_forward_gradient(op, "weight", *weight);

  const bool needs_grad = torch::autograd::compute_requires_grad(x, weight);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!needs_grad) return call_rms_norm(x, weight, eps, zero_centered_gamma);

  check_forward(op, x, weight, eps);  // or the message would name rms_norm_forward
  const auto node = new_node("AutomodelRmsNormBackward", x, {}, weight, zero_centered_gamma);
  auto [y, rstd] = call_forward(x, weight, eps, zero_centered_gamma);
  torch::autograd::set_history(y, node);
  node->save(x, /*is_output=*/false, weight, rstd);
  return y;
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                const OptionalTensor& weight, double eps,
                                                bool zero_centered_gamma) {
  const char* op = "add_rms_norm";
  check_no_forward_gradient(op, "x", x);
  check_no_forward_gradient(op, "residual", residual);
  if (weight.has_value()) check_no_forward_gradient(op, "weight", *weight);

  const bool sum_needs_grad = torch::autograd::compute_requires_grad(x, residual);
  const bool needs_grad = sum_needs_grad || torch::autograd::compute_requires_grad(weight);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!needs_grad) return call_add_rms_norm(x, residual, weight, eps, zero_centered_gamma);

  check_add_forward(op, x, residual, weight, eps);
  const auto node =
      new_node("AutomodelAddRmsNormBackward", x, residual, weight, zero_centered_gamma);
  auto [y, sum, rstd] = call_add_forward(x, residual, weight, eps, zero_centered_gamma);
  torch::autograd::set_history(y, node);
  if (sum_needs_grad) torch::autograd::set_history(sum, node);
  node->save(sum, /*is_output=*/true, weight, rstd);
  return {std::move(y), std::move(sum)};
}

}  // namespace

TORCH_LIBRARY_IMPL(automodel, Autograd, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("add_rms_norm", add_rms_norm);
  // Differentiating the inner ops, which is how a second derivative arrives here, raises with the
  // op's name when the derivative is used.
  m.impl("rms_norm_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("rms_norm_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("add_rms_norm_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("add_rms_norm_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace automodel::op
