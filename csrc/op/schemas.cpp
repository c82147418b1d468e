#include <torch/library.h>

TORCH_LIBRARY(automodel, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def("rms_norm(Tensor x, Tensor? weight, float eps, bool zero_centered_gamma=False) -> Tensor",
        tags);
  m.def(
      "rms_norm_forward(Tensor x, Tensor? weight, float eps, bool zero_centered_gamma) "
      "-> (Tensor y, Tensor rstd)",
      tags);
  m.def(
      "rms_norm_backward(Tensor grad_y, Tensor x, Tensor? weight, Tensor rstd, "
      "bool zero_centered_gamma, bool[2] output_mask) -> (Tensor, Tensor)",
      tags);
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, "
      "bool zero_centered_gamma=False) -> (Tensor y, Tensor sum)",
      tags);
  m.def(
      "add_rms_norm_forward(Tensor x, Tensor residual, Tensor? weight, float eps, "
      "bool zero_centered_gamma) -> (Tensor y, Tensor sum, Tensor rstd)",
      tags);
  m.def(
      "add_rms_norm_backward(Tensor grad_y, Tensor grad_sum, Tensor sum, Tensor? weight, "
      "Tensor rstd, bool zero_centered_gamma, bool[2] output_mask) -> (Tensor, Tensor)",
      tags);
}
