// The contract's operations in A, each rounded once.
#pragma once

#include <cmath>

#include "numerics/macros.h"

namespace automodel::numerics {

#if defined(__CUDA_ARCH__)

AUTOMODEL_NUMERICS float add(float a, float b) { return __fadd_rn(a, b); }
AUTOMODEL_NUMERICS float mul(float a, float b) { return __fmul_rn(a, b); }
AUTOMODEL_NUMERICS float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
AUTOMODEL_NUMERICS float div(float a, float b) { return __fdiv_rn(a, b); }
AUTOMODEL_NUMERICS float sqrt(float a) { return __fsqrt_rn(a); }

AUTOMODEL_NUMERICS double add(double a, double b) { return __dadd_rn(a, b); }
AUTOMODEL_NUMERICS double mul(double a, double b) { return __dmul_rn(a, b); }
AUTOMODEL_NUMERICS double fma(double a, double b, double c) { return __fma_rn(a, b, c); }
AUTOMODEL_NUMERICS double div(double a, double b) { return __ddiv_rn(a, b); }
AUTOMODEL_NUMERICS double sqrt(double a) { return __dsqrt_rn(a); }

#else

// The build compiles this with -ffp-contract=off: a compiler that fuses mul into add breaks the
// contract, and the golden digests show it.
template <class A>
AUTOMODEL_NUMERICS A add(A a, A b) {
  return a + b;
}
template <class A>
AUTOMODEL_NUMERICS A mul(A a, A b) {
  return a * b;
}
template <class A>
AUTOMODEL_NUMERICS A div(A a, A b) {
  return a / b;
}
AUTOMODEL_NUMERICS float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
AUTOMODEL_NUMERICS double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
AUTOMODEL_NUMERICS float sqrt(float a) { return __builtin_sqrtf(a); }
AUTOMODEL_NUMERICS double sqrt(double a) { return __builtin_sqrt(a); }

#endif

template <class A>
AUTOMODEL_NUMERICS A mean_of(A row_sum, int64_t hidden) {
  return div(row_sum, static_cast<A>(hidden));
}

template <class A>
AUTOMODEL_NUMERICS A rstd_of(A sum_of_squares, int64_t hidden, A eps) {
  return div(A(1), sqrt(add(mean_of(sum_of_squares, hidden), eps)));
}

// The last step of every row sum and column sum.
template <class A>
AUTOMODEL_NUMERICS A finish_sum(A total) {
  return add(total, A(0));
}

}  // namespace automodel::numerics
