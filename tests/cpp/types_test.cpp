// The conversions of the contract, over every bit pattern of the 16-bit types. Between two
// neighbours rounding can only change at their midpoint, so the midpoints and the values next to
// them decide it.
#include "numerics/types.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace automodel::numerics {
namespace {

template <class X>
struct Format;
template <>
struct Format<BFloat16> {
  static constexpr int kSignificandBits = 7;
  static constexpr int kBias = 127;
};
template <>
struct Format<Float16> {
  static constexpr int kSignificandBits = 10;
  static constexpr int kBias = 15;
};

// The value of a pattern without sign by IEEE 754's definition. Infinity's is the power of two that
// would follow the largest finite value: that is what decides rounding there.
template <class X>
double value_of(int pattern) {
  constexpr int kBits = Format<X>::kSignificandBits;
  const int exponent = pattern >> kBits;
  const int fraction = pattern & ((1 << kBits) - 1);
  const int unit = (exponent == 0 ? 1 : exponent) - Format<X>::kBias - kBits;
  return std::ldexp(exponent == 0 ? fraction : fraction + (1 << kBits), unit);
}

template <class X>
constexpr int kInfinity = (2 * Format<X>::kBias + 1) << Format<X>::kSignificandBits;

template <class X>
class SixteenBits : public ::testing::Test {};
using SixteenBitTypes = ::testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(SixteenBits, SixteenBitTypes);

// round_to<X> of `value` and of -value.
template <class X, class From>
void expect_rounds(From value, int pattern) {
  ASSERT_EQ(round_to<X>(value).bits, pattern) << value;
  ASSERT_EQ(round_to<X>(-value).bits, pattern | 0x8000) << -value;
}

TYPED_TEST(SixteenBits, WidensEveryPatternExactly) {
  for (int pattern = 0; pattern < kInfinity<TypeParam>; ++pattern) {
    const TypeParam positive{static_cast<uint16_t>(pattern)};
    const TypeParam negative{static_cast<uint16_t>(pattern | 0x8000)};
    ASSERT_EQ(to_float(positive), value_of<TypeParam>(pattern)) << pattern;
    ASSERT_EQ(to_float(negative), -value_of<TypeParam>(pattern)) << pattern;
    ASSERT_TRUE(std::signbit(to_float(negative))) << pattern;
  }
}

TYPED_TEST(SixteenBits, WidensInfinityAndNan) {
  for (int sign : {0, 0x8000}) {
    const TypeParam infinity{static_cast<uint16_t>(kInfinity<TypeParam> | sign)};
    EXPECT_EQ(to_float(infinity), sign == 0 ? HUGE_VALF : -HUGE_VALF);
    for (int pattern = kInfinity<TypeParam> + 1; pattern < 0x8000; ++pattern) {
      ASSERT_TRUE(std::isnan(to_float(TypeParam{static_cast<uint16_t>(pattern | sign)})));
    }
  }
}

TYPED_TEST(SixteenBits, KeepsEveryValue) {
  for (int pattern = 0; pattern < kInfinity<TypeParam>; ++pattern) {
    const double value = value_of<TypeParam>(pattern);
    expect_rounds<TypeParam>(value, pattern);
    expect_rounds<TypeParam>(static_cast<float>(value), pattern);
  }
}

TYPED_TEST(SixteenBits, RoundsFloatsToNearestEven) {
  for (int low = 0; low < kInfinity<TypeParam>; ++low) {
    const int even = low + (low & 1);
    const float middle =
        static_cast<float>((value_of<TypeParam>(low) + value_of<TypeParam>(low + 1)) / 2);
    expect_rounds<TypeParam>(middle, even);
    expect_rounds<TypeParam>(std::nextafter(middle, 0.0f), low);
    expect_rounds<TypeParam>(std::nextafter(middle, HUGE_VALF), low + 1);
    const float high = static_cast<float>(value_of<TypeParam>(low + 1));
    expect_rounds<TypeParam>(std::nextafter(high, 0.0f), low + 1);
  }
}

// By way of float, the doubles next to a midpoint would become the midpoint and then tie.
TYPED_TEST(SixteenBits, RoundsDoublesOnce) {
  for (int low = 0; low < kInfinity<TypeParam>; ++low) {
    const int even = low + (low & 1);
    const double middle = (value_of<TypeParam>(low) + value_of<TypeParam>(low + 1)) / 2;
    expect_rounds<TypeParam>(middle, even);
    expect_rounds<TypeParam>(std::nextafter(middle, 0.0), low);
    expect_rounds<TypeParam>(std::nextafter(middle, HUGE_VAL), low + 1);
    expect_rounds<TypeParam>(middle * (1 - 0x1p-40), low);
    expect_rounds<TypeParam>(middle * (1 + 0x1p-40), low + 1);
    expect_rounds<TypeParam>(std::nextafter(value_of<TypeParam>(low + 1), 0.0), low + 1);
  }
}

TYPED_TEST(SixteenBits, RoundsTheExtremes) {
  expect_rounds<TypeParam>(0.0f, 0);
  expect_rounds<TypeParam>(0.0, 0);
  expect_rounds<TypeParam>(std::numeric_limits<float>::denorm_min(), 0);
  expect_rounds<TypeParam>(std::numeric_limits<double>::denorm_min(), 0);
  expect_rounds<TypeParam>(std::numeric_limits<double>::min(), 0);
  expect_rounds<TypeParam>(std::numeric_limits<float>::max(), kInfinity<TypeParam>);
  expect_rounds<TypeParam>(std::numeric_limits<double>::max(), kInfinity<TypeParam>);
  expect_rounds<TypeParam>(0x1p128, kInfinity<TypeParam>);
  expect_rounds<TypeParam>(HUGE_VALF, kInfinity<TypeParam>);
  expect_rounds<TypeParam>(HUGE_VAL, kInfinity<TypeParam>);
}

// The lowest and the highest payloads are those that a carry would turn into an infinity or a zero.
TYPED_TEST(SixteenBits, RoundsNanToAQuietNan) {
  constexpr int kQuiet = 1 << (Format<TypeParam>::kSignificandBits - 1);
  for (uint32_t sign : {0u, 0x80000000u}) {
    for (uint32_t payload : {0x1u, 0x8000u, 0x3fffffu, 0x400000u, 0x7fffffu}) {
      const auto single = bit_cast<float>(sign | 0x7f800000u | payload);
      const auto wide = bit_cast<double>(uint64_t{sign} << 32 | 0x7ff0000000000000u | payload);
      for (const int bits : {round_to<TypeParam>(single).bits, round_to<TypeParam>(wide).bits}) {
        EXPECT_GT(bits & 0x7fff, kInfinity<TypeParam>) << std::hex << payload;
        EXPECT_TRUE(bits & kQuiet) << std::hex << payload;
      }
    }
  }
}

TEST(Float32, RoundsDoublesToNearestEven) {
  EXPECT_EQ(round_to<float>(1 + 0x1p-24), 1.0f);
  EXPECT_EQ(round_to<float>(1 + 0x3p-24), 1 + 0x1p-22f);
  EXPECT_EQ(round_to<float>(1 + 0x1p-24 + 0x1p-52), 1 + 0x1p-23f);
  EXPECT_EQ(round_to<float>(0x1p-150), 0.0f);
  EXPECT_EQ(round_to<float>(0x1.8p-149), 0x1p-148f);
  EXPECT_EQ(round_to<float>(0x1.ffffffp127), HUGE_VALF);
}

TEST(RoundToOdd, KeepsExactValuesAndMarksOthers) {
  EXPECT_EQ(round_to_odd(1.5), 1.5f);
  EXPECT_EQ(round_to_odd(-0x1p-149), -0x1p-149f);
  EXPECT_EQ(round_to_odd(1 + 0x1p-52), 1 + 0x1p-23f);
  EXPECT_EQ(round_to_odd(-(1 + 0x1p-52)), -(1 + 0x1p-23f));
  EXPECT_EQ(round_to_odd(2 - 0x1p-52), 2 - 0x1p-23f);
  EXPECT_EQ(round_to_odd(0x1p-1074), 0x1p-149f);
  EXPECT_EQ(round_to_odd(0x1p-150), 0x1p-149f);
  EXPECT_EQ(round_to_odd(0x1.4p-148), 0x1.8p-148f);
  EXPECT_EQ(round_to_odd(0x1p200), std::numeric_limits<float>::max());
  EXPECT_EQ(round_to_odd(HUGE_VAL), HUGE_VALF);
}

}  // namespace
}  // namespace automodel::numerics
