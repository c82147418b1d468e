#include "op/checks.h"

#include <c10/core/ScalarType.h>
#include <c10/core/SymBool.h>

#include <cmath>

namespace automodel::op {
namespace {

bool is_supported(at::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf || type == at::kFloat || type == at::kDouble;
}

void check_dense(const char* op, const char* name, const at::Tensor& tensor) {
  const bool dense =
      tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_nested();
  TORCH_CHECK(dense, op, ": ", name, " must be a dense strided tensor, got ",
              tensor.is_nested() ? "a nested tensor of layout " : "layout ", tensor.layout(),
              " with dtype ", tensor.scalar_type());
}

void check_x(const char* op, const at::Tensor& x) {
  check_dense(op, "x", x);
  TORCH_CHECK_TYPE(is_supported(x.scalar_type()), op,
                   ": x must be bfloat16, float16, float32 or float64, got ", x.scalar_type());
  TORCH_CHECK(x.dim() >= 1, op, ": x must have at least 1 dimension, got a 0-dimensional tensor");
  TORCH_SYM_CHECK(x.sym_size(-1).sym_ne(0), op,
                  ": x.size(-1) must be at least 1, got 0 in a tensor of shape ", x.sym_sizes());
}

void check_weight(const char* op, const at::Tensor& x, const at::Tensor& weight) {
  check_dense(op, "weight", weight);
  TORCH_CHECK_TYPE(is_supported(weight.scalar_type()) &&
                       (weight.scalar_type() != at::kDouble || x.scalar_type() == at::kDouble),
                   op, ": weight of dtype ", weight.scalar_type(), " does not go with x of dtype ",
                   x.scalar_type(),
                   "; weight may be bfloat16, float16 or float32, and float64 with float64 x");
  TORCH_CHECK(weight.device() == x.device(), op, ": weight must be on the device of x, ",
              x.device(), ", got ", weight.device());
  TORCH_CHECK(weight.dim() == 1, op,
              ": weight must have 1 dimension of x.size(-1) = ", x.sym_size(-1),
              " elements, got shape ", weight.sym_sizes());
  TORCH_SYM_CHECK(weight.sym_size(0).sym_eq(x.sym_size(-1)), op,
                  ": weight must have x.size(-1) = ", x.sym_size(-1), " elements, got ",
                  weight.sym_size(0));
}

void check_shape(const char* op, const char* name, const at::Tensor& tensor,
                 c10::SymIntArrayRef expected) {
  TORCH_CHECK(tensor.dim() == static_cast<int64_t>(expected.size()), op, ": ", name,
              " must have shape ", expected, ", got ", tensor.sym_sizes());
  for (size_t dim = 0; dim < expected.size(); ++dim) {
    TORCH_SYM_CHECK(tensor.sym_size(static_cast<int64_t>(dim)).sym_eq(expected[dim]), op, ": ",
                    name, " must have shape ", expected, ", got ", tensor.sym_sizes());
  }
}

}  // namespace

at::ScalarType accumulate_type(at::ScalarType x_type) {
  return x_type == at::kDouble ? at::kDouble : at::kFloat;
}

void check_forward(const char* op, const at::Tensor& x, const OptionalTensor& weight, double eps) {
  check_x(op, x);
  if (weight.has_value()) check_weight(op, x, *weight);
  // What the kernels add is A(eps).
  const double eps_in_a = x.scalar_type() == at::kDouble ? eps : static_cast<float>(eps);
  TORCH_CHECK_VALUE(std::isfinite(eps_in_a) && eps >= 0.0, op,
                    ": eps must be at least 0 and finite in ", accumulate_type(x.scalar_type()),
                    ", got ", eps);
}

void check_backward(const at::Tensor& grad_y, const at::Tensor& x, const OptionalTensor& weight,
                    const at::Tensor& rstd, std::array<bool, 2> output_mask) {
  const char* op = "rms_norm_backward";
  check_x(op, x);
  if (weight.has_value()) check_weight(op, x, *weight);
  check_dense(op, "grad_y", grad_y);
  TORCH_CHECK_TYPE(grad_y.scalar_type() == x.scalar_type(), op,
                   ": grad_y must have the dtype of x, ", x.scalar_type(), ", got ",
                   grad_y.scalar_type());
  TORCH_CHECK(grad_y.device() == x.device(), op, ": grad_y must be on the device of x, ",
              x.device(), ", got ", grad_y.device());
  check_shape(op, "grad_y", grad_y, x.sym_sizes());
  check_dense(op, "rstd", rstd);
  TORCH_CHECK_TYPE(rstd.scalar_type() == accumulate_type(x.scalar_type()), op,
                   ": rstd must have dtype ", accumulate_type(x.scalar_type()), " for x of dtype ",
                   x.scalar_type(), ", got ", rstd.scalar_type());
  TORCH_CHECK(rstd.device() == x.device(), op, ": rstd must be on the device of x, ", x.device(),
              ", got ", rstd.device());
  check_shape(op, "rstd", rstd, x.sym_sizes().slice(0, x.dim() - 1));
  TORCH_CHECK(!output_mask[1] || weight.has_value(), op,
              ": output_mask asks for the gradient of weight, but weight is None");
}

}  // namespace automodel::op
