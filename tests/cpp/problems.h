// The problems that the kernels' tests go over.
#pragma once

#include <vector>

#include "golden_run.h"

namespace automodel::testing {

// Every pair of dtypes that the op takes, with both meanings of the weight, without and with a
// residual.
inline std::vector<GoldenCase> every_dtype(int64_t rows, int64_t hidden) {
  std::vector<GoldenCase> problems;
  for (DType x : {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat64}) {
    for (DType weight :
         {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat64, DType::kNone}) {
      if (weight == DType::kFloat64 && x != DType::kFloat64) continue;
      for (bool zero_centered : {false, true}) {
        if (weight == DType::kNone && zero_centered) continue;
        for (bool residual : {false, true}) {
          problems.push_back({rows, hidden, x, weight, zero_centered, 1e-6,
                              numerics::GoldenKind::kPlain, residual});
        }
      }
    }
  }
  return problems;
}

// Each type of x with a weight of the same type, without and with a residual.
inline std::vector<GoldenCase> every_x_dtype(int64_t rows, int64_t hidden) {
  std::vector<GoldenCase> problems;
  for (DType x : {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat64}) {
    for (bool residual : {false, true}) {
      problems.push_back({rows, hidden, x, x, false, 1e-6, numerics::GoldenKind::kPlain, residual});
    }
  }
  return problems;
}

// Every remainder of the vectors' width, and the edges of the tree's sizes.
constexpr int64_t kWidths[] = {1,   2,   7,   8,   9,   15,  16,  17,   31,   33,   127,
                               128, 129, 255, 257, 264, 511, 513, 1021, 1032, 2057, 4099};

}  // namespace automodel::testing
