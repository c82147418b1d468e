// The golden cases. A case is known by its place in this list: append, never insert.
#pragma once

#include "numerics/golden_inputs.h"

namespace automodel::numerics {

constexpr GoldenCase kGoldenCases[] = {
#define CASE(rows, hidden, x, weight, zero_centered, eps, kind) \
  {rows, hidden, DType::k##x, DType::k##weight, zero_centered, eps, GoldenKind::k##kind}
    // Every pair of dtypes, both meanings of the weight.
    CASE(19, 128, BFloat16, BFloat16, false, 1e-5, Plain),
    CASE(19, 128, BFloat16, BFloat16, true, 1e-5, Plain),
    CASE(19, 128, BFloat16, Float16, false, 1e-5, Plain),
    CASE(19, 128, BFloat16, Float32, true, 1e-5, Plain),
    CASE(19, 128, BFloat16, None, false, 1e-5, Plain),
    CASE(19, 128, Float16, BFloat16, true, 1e-5, Plain),
    CASE(19, 128, Float16, Float16, false, 1e-5, Plain),
    CASE(19, 128, Float16, Float32, false, 1e-5, Plain),
    CASE(19, 128, Float16, None, false, 1e-5, Plain),
    CASE(19, 128, Float32, BFloat16, false, 1e-5, Plain),
    CASE(19, 128, Float32, Float16, true, 1e-5, Plain),
    CASE(19, 128, Float32, Float32, false, 1e-5, Plain),
    CASE(19, 128, Float32, Float32, true, 1e-5, Plain),
    CASE(19, 128, Float32, None, false, 1e-5, Plain),
    CASE(19, 128, Float64, BFloat16, false, 1e-5, Plain),
    CASE(19, 128, Float64, Float16, false, 1e-5, Plain),
    CASE(19, 128, Float64, Float32, true, 1e-5, Plain),
    CASE(19, 128, Float64, Float64, false, 1e-5, Plain),
    CASE(19, 128, Float64, None, false, 1e-5, Plain),
    // Widths: ragged ends, every size of the tree, the models' widths.
    CASE(5, 1, BFloat16, BFloat16, false, 1e-6, Plain),
    CASE(5, 1, Float32, Float32, false, 1e-6, Plain),
    CASE(9, 2, Float32, Float32, false, 1e-6, Plain),
    CASE(9, 7, BFloat16, Float32, false, 1e-6, Plain),
    CASE(9, 7, Float64, Float64, true, 1e-6, Plain),
    CASE(17, 8, BFloat16, BFloat16, false, 1e-6, Plain),
    CASE(17, 33, Float16, Float16, false, 1e-6, Plain),
    CASE(17, 111, BFloat16, BFloat16, true, 1e-6, Plain),
    CASE(33, 127, Float32, Float32, false, 1e-6, Plain),
    CASE(33, 257, Float32, BFloat16, false, 1e-6, Plain),
    CASE(33, 500, BFloat16, BFloat16, false, 1e-6, Plain),
    CASE(33, 512, BFloat16, BFloat16, false, 1e-6, Plain),
    CASE(33, 768, Float32, Float32, false, 1e-6, Plain),
    CASE(65, 1000, Float32, Float32, false, 1e-6, Plain),
    CASE(65, 1024, BFloat16, BFloat16, false, 1e-6, Plain),
    CASE(20, 2048, Float16, Float32, false, 1e-6, Plain),
    CASE(20, 2688, BFloat16, BFloat16, false, 1e-5, Plain),
    CASE(20, 2688, Float32, Float32, true, 1e-5, Plain),
    CASE(20, 3072, BFloat16, BFloat16, false, 1e-5, Plain),
    CASE(20, 4096, BFloat16, BFloat16, false, 1e-5, Plain),
    CASE(20, 4096, Float32, Float32, false, 1e-5, Plain),
    CASE(10, 4099, BFloat16, BFloat16, false, 1e-5, Plain),
    CASE(10, 5120, BFloat16, Float32, false, 1e-5, Plain),
    CASE(10, 8192, BFloat16, BFloat16, false, 1e-5, Plain),
    CASE(10, 8192, Float64, Float64, false, 1e-5, Plain),
    CASE(9, 16384, BFloat16, BFloat16, false, 1e-5, Plain),
    CASE(9, 16384, Float32, Float32, false, 1e-5, Plain),
    CASE(3, 32776, BFloat16, BFloat16, false, 1e-5, Plain),
    CASE(2, 65536, BFloat16, BFloat16, false, 1e-5, Plain),
    CASE(2, 65537, Float32, Float32, false, 1e-5, Plain),
    CASE(1, 131072, Float16, Float16, false, 1e-5, Plain),
    CASE(1, 262144, Float32, None, false, 1e-5, Plain),
    // Many rows: deep trees over rows, whole and ragged leaves.
    CASE(1, 128, BFloat16, BFloat16, false, 1e-5, Plain),
    CASE(8, 128, Float32, Float32, false, 1e-5, Plain),
    CASE(1024, 64, BFloat16, BFloat16, false, 1e-5, Plain),
    CASE(4097, 48, Float32, Float32, true, 1e-5, Plain),
    CASE(3001, 128, BFloat16, BFloat16, false, 1e-5, Plain),
    // Ranges and eps.
    CASE(19, 300, BFloat16, BFloat16, false, 0.0, Tiny),
    CASE(19, 300, Float32, Float32, false, 0.0, Tiny),
    CASE(19, 300, Float16, Float16, false, 1e-12, Tiny),
    CASE(19, 300, Float64, Float64, false, 0.0, Tiny),
    CASE(19, 300, BFloat16, BFloat16, true, 1e-5, Huge),
    CASE(19, 300, Float32, Float32, false, 1e-5, Huge),
    CASE(19, 300, Float16, Float16, false, 1e-5, Huge),
    CASE(19, 300, Float64, Float32, false, 1e-5, Huge),
    CASE(19, 1024, BFloat16, BFloat16, false, 1e-6, Spiky),
    CASE(19, 1024, Float32, Float32, false, 1e-6, Spiky),
    CASE(19, 1024, Float32, Float32, false, 0.1 + 0.2, Spiky),
    CASE(20, 136, BFloat16, BFloat16, false, 1e-8, ZeroRows),
    CASE(20, 136, Float16, Float32, false, 1e-12, ZeroRows),
    CASE(20, 136, Float32, Float32, true, 1.2e-6, ZeroRows),
#undef CASE
// With a residual.
#define CASE(rows, hidden, x, weight, zero_centered, eps, kind) \
  {rows, hidden, DType::k##x, DType::k##weight, zero_centered, eps, GoldenKind::k##kind, true}
    CASE(19, 128, BFloat16, BFloat16, false, 1e-5, Plain),
    CASE(19, 128, BFloat16, Float32, true, 1e-5, Plain),
    CASE(19, 128, BFloat16, None, false, 1e-5, Plain),
    CASE(19, 128, Float16, Float16, false, 1e-5, Plain),
    CASE(19, 128, Float32, Float32, false, 1e-5, Plain),
    CASE(19, 128, Float32, BFloat16, true, 1e-5, Plain),
    CASE(19, 128, Float64, Float64, false, 1e-5, Plain),
    CASE(19, 128, Float64, None, false, 1e-5, Plain),
    CASE(5, 1, Float32, Float32, false, 1e-6, Plain),
    CASE(9, 7, BFloat16, Float32, false, 1e-6, Plain),
    CASE(33, 127, Float16, Float16, true, 1e-6, Plain),
    CASE(65, 1000, Float32, Float32, false, 1e-6, Plain),
    CASE(20, 2688, BFloat16, BFloat16, false, 1e-5, Plain),
    CASE(20, 4096, Float32, Float32, false, 1e-5, Plain),
    CASE(10, 4099, BFloat16, BFloat16, false, 1e-5, Plain),
    CASE(10, 8192, BFloat16, BFloat16, false, 1e-5, Plain),
    CASE(9, 16384, Float32, BFloat16, false, 1e-5, Plain),
    CASE(2, 65537, BFloat16, BFloat16, false, 1e-5, Plain),
    CASE(1025, 64, BFloat16, BFloat16, false, 1e-5, Plain),
    CASE(19, 300, Float32, Float32, false, 0.0, Tiny),
    CASE(19, 300, BFloat16, BFloat16, false, 1e-5, Huge),
    CASE(19, 1024, BFloat16, BFloat16, false, 1e-6, Spiky),
    CASE(20, 136, Float16, Float32, false, 1e-12, ZeroRows),
    CASE(20, 136, Float32, Float32, true, 1.2e-6, ZeroRows),
#undef CASE
};

constexpr int kGoldenCaseCount = sizeof(kGoldenCases) / sizeof(kGoldenCases[0]);

}  // namespace automodel::numerics
