// P7: the digests in numerics/golden.h.
#include "numerics/golden.h"

#include <gtest/gtest.h>

#include "golden_run.h"
#include "isas.h"

namespace automodel::testing {
namespace {

class Golden : public EachIsa {};
INSTANTIATE_FOR_EACH_ISA(Golden);

TEST_P(Golden, Digests) {
  for (int number = 0; number < numerics::kGoldenCaseCount; ++number) {
    const GoldenCase& c = numerics::kGoldenCases[number];
    SCOPED_TRACE(name_of(c, number));
    const GoldenDigests got = digests_of(c, run(kernels(), c, make_inputs(c, number)));
    const GoldenDigests& expected = numerics::kGoldenDigests[number];
    EXPECT_EQ(got.sum, expected.sum);
    EXPECT_EQ(got.y, expected.y);
    EXPECT_EQ(got.rstd, expected.rstd);
    EXPECT_EQ(got.grad_x, expected.grad_x);
    EXPECT_EQ(got.grad_weight, expected.grad_weight);
  }
}

// A case that was appended without `make golden` has digests of zero.
TEST(GoldenCases, AllHaveDigests) {
  for (int number = 0; number < numerics::kGoldenCaseCount; ++number) {
    const GoldenDigests& digests = numerics::kGoldenDigests[number];
    EXPECT_TRUE(digests.y != 0 && digests.rstd != 0 && digests.grad_x != 0) << number;
    const bool has_weight = numerics::kGoldenCases[number].weight_dtype != DType::kNone;
    EXPECT_EQ(digests.grad_weight != 0, has_weight) << number;
    EXPECT_EQ(digests.sum != 0, numerics::kGoldenCases[number].residual) << number;
  }
}

}  // namespace
}  // namespace automodel::testing
