// What may be read and written 16 bytes at a time. Decides which kernel runs, never a bit.
#pragma once

#include <cstdint>

#include "numerics/params.h"
#include "numerics/spec.h"

namespace automodel::cuda {

inline bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Of every row; of a null pointer with an empty layout too. A contiguous tensor has the layout
// {1, {hidden}, {rows}}.
inline bool is_aligned(const void* data, const numerics::RowLayout& layout, numerics::DType dtype) {
  bool aligned = is_aligned(data);
  for (int dim = 0; dim < layout.dims; ++dim) {
    aligned = aligned && layout.strides[dim] * element_size(dtype) % 16 == 0;
  }
  return aligned;
}

inline bool is_aligned(const void* data, int64_t row_stride, numerics::DType dtype) {
  return is_aligned(data) && row_stride * element_size(dtype) % 16 == 0;
}

// For kernels that take four columns or more at once.
inline bool partials_are_aligned(const numerics::BackwardParams& params) {
  return params.hidden % 4 == 0 && is_aligned(params.partials);
}

// Whether every row is whole aligned chunks, in A = float.
inline bool rows_are_whole(const numerics::ForwardParams& params) {
  return params.x_dtype != numerics::DType::kFloat64 && params.hidden % numerics::kSlots == 0 &&
         is_aligned(params.x, params.x_layout, params.x_dtype) &&
         is_aligned(params.residual, params.residual_layout, params.x_dtype) &&
         is_aligned(params.weight) && is_aligned(params.y) && is_aligned(params.sum);
}

inline bool rows_are_whole(const numerics::BackwardParams& params) {
  return params.x_dtype != numerics::DType::kFloat64 && params.hidden % numerics::kSlots == 0 &&
         is_aligned(params.x, params.x_layout, params.x_dtype) &&
         is_aligned(params.grad_y, params.grad_y_layout, params.x_dtype) &&
         is_aligned(params.grad_sum, params.grad_sum_layout, params.x_dtype) &&
         is_aligned(params.weight) && is_aligned(params.grad_x);
}

}  // namespace automodel::cuda
