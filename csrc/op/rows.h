// A tensor as rows of its last dimension, for the kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include "numerics/params.h"

namespace automodel::op {

struct Rows {
  at::Tensor
      tensor;  // the tensor itself where its rows can be read in place, else a contiguous copy
  numerics::RowLayout layout{};

  const void* data() const { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }
};

// Rows are read in place where the last dimension has stride 1 and the outer dimensions, after
// those that are adjacent in memory are joined, number at most numerics::kMaxRowDims. An undefined
// tensor has none.
Rows as_rows(const at::Tensor& tensor);

numerics::DType dtype_of(const at::Tensor& tensor);

}  // namespace automodel::op
