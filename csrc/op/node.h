// What the autograd kernels share: nodes, tangents, and the way below autograd.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <mutex>
#include <string>

#include "op/checks.h"

namespace automodel::op {

// A hand-written node, as ATen's generated code uses, because torch::autograd::Function refuses
// torch.func transforms.
struct NamedNode : torch::autograd::Node {
  const char* title = "";
  std::string name() const override { return title; }
};

// Older torch owns nodes by std::shared_ptr, later ones by c10::intrusive_ptr.
template <class T>
auto make_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, T>) {
    return c10::make_intrusive<T>();
  } else {
    // Unqualified: looked up when T is known, and later torch has no deleteNode.
    return std::shared_ptr<T>(new T(), [](auto* node) { deleteNode(node); });
  }
}

inline at::Tensor or_undefined(const OptionalTensor& tensor) {
  return tensor.has_value() ? *tensor : at::Tensor();
}

inline OptionalTensor or_nullopt(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

template <class... Tensors>
bool any_tangent(const Tensors&... tensors) {
  return (... || torch::autograd::isFwGradDefined(tensors));
}

// Level 0 is the only level that torch has.
inline at::Tensor tangent_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor._fw_grad(0) : tensor;
}

inline at::Tensor primal_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor._fw_primal(0) : tensor;
}

inline void set_tangent(const at::Tensor& tensor, const at::Tensor& tangent) {
  if (tangent.defined()) tensor._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
}

template <class Call>
auto below_autograd(const Call& call) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call();
}

}  // namespace automodel::op
