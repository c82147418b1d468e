// Bit equality that names the first difference.
#pragma once

#include <gtest/gtest.h>

#include "golden_run.h"

namespace automodel::testing {

inline uint64_t bits_at(const Bytes& bytes, DType dtype, int64_t index) {
  uint64_t bits = 0;
  memcpy(&bits, bytes.data() + static_cast<size_t>(index) * size_of(dtype), size_of(dtype));
  return bits;
}

inline bool is_nan(uint64_t bits, DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return (bits & 0x7fff) > 0x7f80;
    case DType::kFloat16:
      return (bits & 0x7fff) > 0x7c00;
    case DType::kFloat32:
      return (bits & 0x7fffffff) > 0x7f800000;
    default:
      return (bits & 0x7fffffffffffffff) > 0x7ff0000000000000;
  }
}

// All NaNs are equal: the contract leaves their payload open.
inline ::testing::AssertionResult same_bits(const Bytes& got, const Bytes& expected, DType dtype) {
  if (got.size() != expected.size()) return ::testing::AssertionFailure() << "different sizes";
  if (dtype == DType::kNone) return ::testing::AssertionSuccess();
  const auto count = static_cast<int64_t>(got.size() / size_of(dtype));
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t a = bits_at(got, dtype, i);
    const uint64_t b = bits_at(expected, dtype, i);
    if (a == b || (is_nan(a, dtype) && is_nan(b, dtype))) continue;
    return ::testing::AssertionFailure() << "first difference at " << i << " of " << count
                                         << ": got 0x" << std::hex << a << ", expected 0x" << b;
  }
  return ::testing::AssertionSuccess();
}

inline void expect_same(const GoldenCase& c, const Outputs& got, const Outputs& expected) {
  EXPECT_TRUE(same_bits(got.sum, expected.sum, c.x_dtype)) << "sum";
  EXPECT_TRUE(same_bits(got.y, expected.y, c.x_dtype)) << "y";
  EXPECT_TRUE(same_bits(got.rstd, expected.rstd, accumulate_dtype(c))) << "rstd";
  EXPECT_TRUE(same_bits(got.grad_x, expected.grad_x, c.x_dtype)) << "grad_x";
  EXPECT_TRUE(same_bits(got.grad_weight, expected.grad_weight, c.weight_dtype)) << "grad_weight";
}

}  // namespace automodel::testing
