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

// The tensor that is normalised, by the name that it has among the op's arguments.
struct Normalised {
  const char* name;
  const at::Tensor& tensor;
};

void check_normalised(const char* op, const Normalised& normalised) {
  const auto& [name, x] = normalised;
  check_dense(op, name, x);
  TORCH_CHECK_TYPE(is_supported(x.scalar_type()), op, ": ", name,
                   " must be bfloat16, float16, float32 or float64, got ", x.scalar_type());
  TORCH_CHECK(x.dim() >= 1, op, ": ", name,
              " must have at least 1 dimension, got a 0-dimensional tensor");
  TORCH_SYM_CHECK(x.sym_size(-1).sym_ne(0), op, ": ", name,
                  ".size(-1) must be at least 1, got 0 in a tensor of shape ", x.sym_sizes());
}

void check_device(const char* op, const char* name, const at::Tensor& tensor,
                  const Normalised& normalised) {
  TORCH_CHECK(tensor.device() == normalised.tensor.device(), op, ": ", name,
              " must be on the device of ", normalised.name, ", ", normalised.tensor.device(),
              ", got ", tensor.device());
}

void check_weight(const char* op, const Normalised& normalised, const at::Tensor& weight) {
  const auto& [name, x] = normalised;
  check_dense(op, "weight", weight);
  TORCH_CHECK_TYPE(is_supported(weight.scalar_type()) &&
                       (weight.scalar_type() != at::kDouble || x.scalar_type() == at::kDouble),
                   op, ": weight of dtype ", weight.scalar_type(), " does not go with ", name,
                   " of dtype ", x.scalar_type(),
                   "; weight may be bfloat16, float16 or float32, and float64 with float64 ", name);
  check_device(op, "weight", weight, normalised);
  TORCH_CHECK(weight.dim() == 1, op, ": weight must have 1 dimension of ", name,
              ".size(-1) = ", x.sym_size(-1), " elements, got shape ", weight.sym_sizes());
  TORCH_SYM_CHECK(weight.sym_size(0).sym_eq(x.sym_size(-1)), op, ": weight must have ", name,
                  ".size(-1) = ", x.sym_size(-1), " elements, got ", weight.sym_size(0));
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

// For a tensor that goes with the normalised one element by element.
void check_like(const char* op, const char* name, const at::Tensor& tensor,
                const Normalised& normalised) {
  check_dense(op, name, tensor);
  TORCH_CHECK_TYPE(tensor.scalar_type() == normalised.tensor.scalar_type(), op, ": ", name,
                   " must have the dtype of ", normalised.name, ", ",
                   normalised.tensor.scalar_type(), ", got ", tensor.scalar_type());
  check_device(op, name, tensor, normalised);
  check_shape(op, name, tensor, normalised.tensor.sym_sizes());
}

void check_gradient(const char* op, const at::Tensor& grad_y, const Normalised& normalised,
                    const OptionalTensor& weight, const at::Tensor& rstd,
                    std::array<bool, 2> output_mask) {
  const auto& [name, x] = normalised;
  check_normalised(op, normalised);
  if (weight.has_value()) check_weight(op, normalised, *weight);
  check_like(op, "grad_y", grad_y, normalised);
  check_dense(op, "rstd", rstd);
  TORCH_CHECK_TYPE(rstd.scalar_type() == accumulate_type(x.scalar_type()), op,
                   ": rstd must have dtype ", accumulate_type(x.scalar_type()), " for ", name,
                   " of dtype ", x.scalar_type(), ", got ", rstd.scalar_type());
  check_device(op, "rstd", rstd, normalised);
  check_shape(op, "rstd", rstd, x.sym_sizes().slice(0, x.dim() - 1));
  TORCH_CHECK(!output_mask[1] || weight.has_value(), op,
              ": output_mask asks for the gradient of weight, but weight is None");
}

}  // namespace

at::ScalarType accumulate_type(at::ScalarType x_type) {
  return x_type == at::kDouble ? at::kDouble : at::kFloat;
}

void check_forward(const char* op, const at::Tensor& x, const OptionalTensor& weight, double eps) {
  const Normalised normalised{"x", x};
  check_normalised(op, normalised);
  if (weight.has_value()) check_weight(op, normalised, *weight);
  // What the kernels add is A(eps).
  const double eps_in_a = x.scalar_type() == at::kDouble ? eps : static_cast<float>(eps);
  TORCH_CHECK_VALUE(std::isfinite(eps_in_a) && eps >= 0.0, op,
                    ": eps must be at least 0 and finite in ", accumulate_type(x.scalar_type()),
                    ", got ", eps);
}

void check_add_forward(const char* op, const at::Tensor& x, const at::Tensor& residual,
                       const OptionalTensor& weight, double eps) {
  check_forward(op, x, weight, eps);
  check_like(op, "residual", residual, {"x", x});
}

void check_backward(const at::Tensor& grad_y, const at::Tensor& x, const OptionalTensor& weight,
                    const at::Tensor& rstd, std::array<bool, 2> output_mask) {
  check_gradient("rms_norm_backward", grad_y, {"x", x}, weight, rstd, output_mask);
}

void check_add_backward(const at::Tensor& grad_y, const at::Tensor& grad_sum, const at::Tensor& sum,
                        const OptionalTensor& weight, const at::Tensor& rstd,
                        std::array<bool, 2> output_mask) {
  const char* op = "add_rms_norm_backward";
  check_gradient(op, grad_y, {"sum", sum}, weight, rstd, output_mask);
  check_like(op, "grad_sum", grad_sum, {"sum", sum});
}

}  // namespace automodel::op
