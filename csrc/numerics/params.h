// What passes between the op and the kernels: plain data, no framework. The structs are copied to
// the GPU as kernel arguments, so they hold values and raw pointers only.
#pragma once

#include <cstdint>

#include "numerics/macros.h"
#include "numerics/spec.h"

namespace automodel::numerics {

enum class DType : int32_t { kBFloat16, kFloat16, kFloat32, kFloat64, kNone };

// In bytes; 0 for kNone.
AUTOMODEL_NUMERICS int64_t element_size(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
      return 8;
    case DType::kNone:
      break;
  }
  return 0;
}

// Where the rows of a strided tensor begin: outer dimensions after joining those that are adjacent
// in memory, outermost first. Strides are in elements. Within a row the stride is 1. With more than
// one dimension there are fewer than 2^32 rows.
constexpr int kMaxRowDims = 8;

struct RowLayout {
  int32_t dims;
  int64_t strides[kMaxRowDims];
  int64_t sizes[kMaxRowDims];
};

AUTOMODEL_NUMERICS int64_t row_offset(const RowLayout& layout, int64_t row) {
  if (layout.dims == 1) return row * layout.strides[0];
  uint32_t index = static_cast<uint32_t>(row);
  int64_t offset = 0;
  for (int dim = layout.dims - 1; dim > 0; --dim) {
    const uint32_t size = static_cast<uint32_t>(layout.sizes[dim]);
    offset += static_cast<int64_t>(index % size) * layout.strides[dim];
    index /= size;
  }
  return offset + static_cast<int64_t>(index) * layout.strides[0];
}

// In these the layouts come last: a GPU fetches arguments line by line, and of the layouts it mostly
// needs the beginning.
struct ForwardParams {
  const void* x;
  const void* residual;  // null without residual
  const void* weight;    // null without weight
  void* y;               // contiguous
  void* sum;             // contiguous; null without residual
  void* rstd;            // contiguous; null when nobody asked for it
  int64_t rows;
  int64_t hidden;
  double eps;
  DType x_dtype;
  DType weight_dtype;  // kNone without weight
  bool zero_centered_gamma;
  RowLayout x_layout;
  RowLayout residual_layout;
};

// How the rows of grad_weight are cut. A unit is consecutive leaves whose part of grad_weight one
// worker sums into row `unit` of partials; join then sums the units. The first `whole` units are
// `leaves` leaves each, the others half as many: powers of two, so each is an aligned subtree.
struct Units {
  int64_t leaves;
  int64_t whole;
  int64_t count;

  constexpr bool operator==(const Units& other) const {
    return leaves == other.leaves && whole == other.whole && count == other.count;
  }
};

AUTOMODEL_NUMERICS constexpr int64_t leaves_of(const Units& units, int64_t unit) {
  return unit < units.whole ? units.leaves : units.leaves / 2;
}
AUTOMODEL_NUMERICS constexpr int64_t first_leaf_of(const Units& units, int64_t unit) {
  return unit < units.whole ? unit * units.leaves : (units.whole + unit) * (units.leaves / 2);
}

AUTOMODEL_NUMERICS constexpr Units whole_units(int64_t rows, int64_t leaves) {
  const int64_t count = (leaves_in(rows) + leaves - 1) / leaves;
  return {leaves, count, count};
}

struct BackwardParams {
  const void* grad_y;
  const void* grad_sum;  // is added to grad_x; null without, and without grad_x
  const void* x;         // what was normalised: x, or the sum
  const void* weight;    // null without weight
  const void* rstd;      // contiguous
  void* grad_x;          // contiguous; null when nobody asked for it
  void* grad_weight;     // null when nobody asked for it
  void* partials;        // A, [units.count, hidden], 16-byte aligned; null without grad_weight
  int64_t rows;
  int64_t hidden;
  Units units;
  DType x_dtype;
  DType weight_dtype;  // how weight is read; kNone without weight
  bool zero_centered_gamma;
  RowLayout x_layout;
  RowLayout grad_y_layout;
  RowLayout grad_sum_layout;
};

}  // namespace automodel::numerics
