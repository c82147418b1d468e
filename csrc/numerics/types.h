// The element types in memory, and the two conversions of the contract: to_accumulate (exact) and
// round_to (to nearest even, once, also from double; any NaN becomes a quiet NaN).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include "numerics/macros.h"

namespace automodel::numerics {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Stands for the weight's type where there is no weight.
struct NoWeight {};

template <class X>
struct AccumulateType {
  using type = float;
};
template <>
struct AccumulateType<double> {
  using type = double;
};
template <class X>
using Accumulate = typename AccumulateType<X>::type;

template <class To, class From>
AUTOMODEL_NUMERICS To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

AUTOMODEL_NUMERICS float to_float(BFloat16 value) {
  return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

AUTOMODEL_NUMERICS float to_float(Float16 value) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(value.bits));
#else
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return bit_cast<float>(sign | bit_cast<uint32_t>(subnormal));
#endif
}

template <class A, class T>
AUTOMODEL_NUMERICS A to_accumulate(T value) {
  if constexpr (sizeof(T) == 2) {
    return to_float(value);
  } else {
    return value;
  }
}

// Rounds towards the neighbour whose last bit is 1. A float so made keeps what a further rounding
// to bfloat16 or float16 has to know, which makes the two roundings one.
AUTOMODEL_NUMERICS float round_to_odd(double value) {
  const uint64_t bits = bit_cast<uint64_t>(value);
  const uint64_t magnitude = bits & 0x7fffffffffffffffull;
  const uint32_t sign = static_cast<uint32_t>(bits >> 63) << 31;
  if (magnitude >= 0x7ff0000000000000ull) return static_cast<float>(value);
  const int exponent = static_cast<int>(magnitude >> 52) - 1023;
  if (exponent > 127) return bit_cast<float>(sign | 0x7f7fffffu);
  if (exponent < -150) return bit_cast<float>(sign | static_cast<uint32_t>(magnitude != 0));
  // 24 significant bits where float is normal, fewer below 2^-126.
  const int dropped = exponent >= -126 ? 29 : 29 + (-126 - exponent);
  const uint64_t significand = (magnitude & 0xfffffffffffffull) | 0x10000000000000ull;
  const uint32_t kept = static_cast<uint32_t>(significand >> dropped);
  const uint32_t sticky = (significand & ((1ull << dropped) - 1)) != 0;
  const uint32_t biased = exponent >= -126 ? static_cast<uint32_t>(exponent + 126) << 23 : 0;
  return bit_cast<float>(sign | (biased + kept) | sticky);
}

// The value's type in memory: round_to<X>(Rounds<X>{}, value) picks the overload.
template <class X>
struct Rounds {};

AUTOMODEL_NUMERICS BFloat16 round_as(Rounds<BFloat16>, float value) {
#if defined(__CUDA_ARCH__)
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
#else
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded)};
#endif
}

AUTOMODEL_NUMERICS Float16 round_as(Rounds<Float16>, float value) {
#if defined(__CUDA_ARCH__)
  return {__half_as_ushort(__float2half_rn(value))};
#else
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x47800000u) {  // 65536 and more
    half = 0x7c00u;
  } else if (magnitude >=
             0x38800000u) {  // normal; a carry out of the significand may reach infinity
    half = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  } else {  // subnormal: the addition of 0.5 leaves the multiple of 2^-24 in the low bits
    half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  }
  return {static_cast<uint16_t>(sign | half)};
#endif
}

AUTOMODEL_NUMERICS float round_as(Rounds<float>, float value) { return value; }
AUTOMODEL_NUMERICS float round_as(Rounds<float>, double value) { return static_cast<float>(value); }
AUTOMODEL_NUMERICS double round_as(Rounds<double>, double value) { return value; }
AUTOMODEL_NUMERICS BFloat16 round_as(Rounds<BFloat16> to, double value) {
  return round_as(to, round_to_odd(value));
}
AUTOMODEL_NUMERICS Float16 round_as(Rounds<Float16> to, double value) {
  return round_as(to, round_to_odd(value));
}

template <class X, class A>
AUTOMODEL_NUMERICS X round_to(A value) {
  return round_as(Rounds<X>{}, value);
}

}  // namespace automodel::numerics
