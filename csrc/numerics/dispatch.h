// From the dtypes in a params struct to types, once for both devices.
#pragma once

#include "numerics/params.h"
#include "numerics/types.h"

namespace automodel::numerics {

template <class T>
struct Type {
  using type = T;
};

// Calls f(Type<W>{}) with the weight's type in memory, NoWeight without weight. float64 weights go
// with float64 x alone; the op has checked that.
template <class X, class F>
auto visit_weight(DType weight_dtype, F f) {
  switch (weight_dtype) {
    case DType::kBFloat16:
      return f(Type<BFloat16>{});
    case DType::kFloat16:
      return f(Type<Float16>{});
    case DType::kFloat32:
      return f(Type<float>{});
    case DType::kFloat64:
      if constexpr (sizeof(X) == sizeof(double)) return f(Type<double>{});
      break;
    case DType::kNone:
      break;
  }
  return f(Type<NoWeight>{});
}

// Calls f(Type<X>{}) with the element type of x.
template <class F>
auto visit_x(DType x_dtype, F f) {
  switch (x_dtype) {
    case DType::kBFloat16:
      return f(Type<BFloat16>{});
    case DType::kFloat16:
      return f(Type<Float16>{});
    case DType::kFloat64:
      return f(Type<double>{});
    default:
      return f(Type<float>{});
  }
}

}  // namespace automodel::numerics
