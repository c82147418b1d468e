#include "op/rows.h"

namespace automodel::op {
namespace {

// False where a RowLayout cannot say it: too many dimensions, or too many rows for several.
bool join_dims(const at::Tensor& tensor, numerics::RowLayout& layout) {
  layout.dims = 0;
  for (int64_t dim = 0; dim < tensor.dim() - 1; ++dim) {
    const int64_t size = tensor.size(dim);
    const int64_t stride = tensor.stride(dim);
    if (size == 1) continue;
    const int32_t last = layout.dims - 1;
    if (layout.dims > 0 && layout.strides[last] == size * stride) {
      layout.sizes[last] *= size;
      layout.strides[last] = stride;
      continue;
    }
    if (layout.dims == numerics::kMaxRowDims) return false;
    layout.sizes[layout.dims] = size;
    layout.strides[layout.dims] = stride;
    ++layout.dims;
  }
  if (layout.dims == 0) {
    layout.sizes[0] = 1;
    layout.strides[0] = 0;
    layout.dims = 1;
  }
  const int64_t rows = tensor.numel() / tensor.size(-1);
  return layout.dims == 1 || rows <= int64_t{UINT32_MAX};
}

}  // namespace

Rows as_rows(const at::Tensor& tensor) {
  Rows rows;
  if (!tensor.defined()) return rows;
  const bool unit_stride = tensor.size(-1) == 1 || tensor.stride(-1) == 1;
  if (unit_stride && join_dims(tensor, rows.layout)) {
    rows.tensor = tensor;
  } else {
    rows.tensor = tensor.contiguous();
    join_dims(rows.tensor, rows.layout);
  }
  return rows;
}

numerics::DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16:
      return numerics::DType::kBFloat16;
    case at::kHalf:
      return numerics::DType::kFloat16;
    case at::kDouble:
      return numerics::DType::kFloat64;
    default:
      return numerics::DType::kFloat32;
  }
}

}  // namespace automodel::op
