// The inputs and the digest of the golden cases, as integer arithmetic that any language can
// repeat: no random number generator is involved. docs/numerics.md gives the same in prose.
#pragma once

#include <cstdint>

#include "numerics/macros.h"
#include "numerics/params.h"
#include "numerics/types.h"

namespace automodel::numerics {

// The values of a case's rows.
enum class GoldenKind : int32_t {
  kPlain,     // about normal, standard deviation 1.15
  kTiny,      // scaled down until squares are subnormal in A (fp16: until x is)
  kHuge,      // scaled up, squares still finite
  kSpiky,     // one element in 64 is 1024 times as large
  kZeroRows,  // rows 1, 4, 7 ... of x and residual and rows 2, 5, 8 ... of grad_y are +0
};

struct GoldenCase {
  int64_t rows;
  int64_t hidden;
  DType x_dtype;
  DType weight_dtype;
  bool zero_centered_gamma;
  double eps;
  GoldenKind kind;
  bool residual = false;
};

struct GoldenDigests {
  uint64_t y;
  uint64_t rstd;
  uint64_t grad_x;
  uint64_t grad_weight;  // 0 without weight
  uint64_t sum = 0;      // 0 without residual
};

// A case's grad_sum has the hashes of the next case's x.
enum class GoldenStream : uint64_t { kX = 0, kWeight = 1, kGradY = 2, kResidual = 3, kGradSum = 4 };

// The finalizer of splitmix64.
AUTOMODEL_NUMERICS constexpr uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

// The sum of four 16-bit fields about its mean: |value| < 2^18, so value * 2^-15 is exact in float.
AUTOMODEL_NUMERICS constexpr int64_t centred_sum(uint64_t hash) {
  return static_cast<int64_t>((hash & 0xffff) + ((hash >> 16) & 0xffff) + ((hash >> 32) & 0xffff) +
                              (hash >> 48)) -
         131070;
}

AUTOMODEL_NUMERICS double golden_scale(GoldenKind kind, DType dtype) {
  if (kind == GoldenKind::kTiny) {
    return dtype == DType::kFloat16 ? 0x1p-18 : dtype == DType::kFloat64 ? 0x1p-530 : 0x1p-70;
  }
  if (kind == GoldenKind::kHuge) {
    return dtype == DType::kFloat16 ? 0x1p12 : dtype == DType::kFloat64 ? 0x1p490 : 0x1p50;
  }
  return 1.0;
}

// Element `index` of a stream, before it is rounded to its dtype. It has at most 19 significant
// bits for the 16-bit dtypes, so the way of rounding there does not matter; float32 and float64 use
// all their bits.
AUTOMODEL_NUMERICS double golden_value(const GoldenCase& c, uint64_t number, GoldenStream stream,
                                       uint64_t index) {
  const uint64_t hash = mix(mix(4 * number + static_cast<uint64_t>(stream)) + index);
  const uint64_t second = mix(hash);
  const DType dtype = stream == GoldenStream::kWeight ? c.weight_dtype : c.x_dtype;
  double value = static_cast<double>(centred_sum(hash)) * 0x1p-15;
  if (dtype == DType::kFloat32 || dtype == DType::kFloat64) {
    value *= static_cast<double>((second >> 12) | (1ull << 52)) * 0x1p-52;
  }
  if (stream == GoldenStream::kWeight) {
    return c.zero_centered_gamma ? value * 0.25 : 1.0 + value * 0.25;
  }
  if (stream == GoldenStream::kGradSum) return value;
  const bool is_gradient = stream == GoldenStream::kGradY;
  const uint64_t row = index / static_cast<uint64_t>(c.hidden);
  if (c.kind == GoldenKind::kZeroRows && row % 3 == (is_gradient ? 2 : 1)) return 0.0;
  if (is_gradient) return value;
  if (c.kind == GoldenKind::kSpiky && (second & 63) == 0) value *= 1024.0;
  return value * golden_scale(c.kind, dtype);
}

// A digest is the sum of digest_term over a tensor's elements in row-major order, modulo 2^64; bits
// is the element's bit pattern, zero-extended.
AUTOMODEL_NUMERICS constexpr uint64_t digest_term(uint64_t bits, uint64_t index) {
  return mix(bits ^ mix(index));
}

}  // namespace automodel::numerics
