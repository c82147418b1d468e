// What the caller's thread and process may have set: rounding, flushing to zero, the instruction
// set.
#include <gtest/gtest.h>

#include <cfenv>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/isa.h"
#include "golden_run.h"
#include "isas.h"

namespace automodel::testing {
namespace {

#if defined(__x86_64__)
using Control = unsigned;
constexpr Control kFlush = _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON;
Control control() { return _mm_getcsr(); }
void set_control(Control value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
using Control = uint64_t;
constexpr Control kFlush = Control{1} << 24;  // FPCR.FZ
Control control() {
  Control value;
  asm volatile("mrs %0, fpcr" : "=r"(value));
  return value;
}
void set_control(Control value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#endif

class Environment : public EachIsa {
 protected:
  void SetUp() override { saved_ = control(); }
  void TearDown() override { set_control(saved_); }

  // Rows whose squares, products and results are subnormal, in every dtype.
  static constexpr GoldenCase kCases[] = {
      {19, 75, DType::kBFloat16, DType::kBFloat16, false, 0.0, numerics::GoldenKind::kTiny},
      {19, 75, DType::kFloat16, DType::kFloat16, false, 1e-12, numerics::GoldenKind::kTiny},
      {19, 75, DType::kFloat32, DType::kFloat32, true, 0.0, numerics::GoldenKind::kTiny},
      {19, 75, DType::kFloat64, DType::kFloat64, false, 0.0, numerics::GoldenKind::kTiny},
  };

  static void expect_same_bits_under(Control value) {
    const Control before = control();
    for (const GoldenCase& c : kCases) {
      const Inputs inputs = make_inputs(c, 0);
      const GoldenDigests expected = digests_of(c, run(kernels(), c, inputs));
      set_control(value);
      const Outputs outputs = run(kernels(), c, inputs);
      const Control after = control();
      set_control(before);
      const GoldenDigests got = digests_of(c, outputs);
      EXPECT_EQ(after, value) << "the caller's settings have to come back";
      EXPECT_EQ(got.y, expected.y) << name_of(c, 0);
      EXPECT_EQ(got.rstd, expected.rstd) << name_of(c, 0);
      EXPECT_EQ(got.grad_x, expected.grad_x) << name_of(c, 0);
      EXPECT_EQ(got.grad_weight, expected.grad_weight) << name_of(c, 0);
    }
  }

 private:
  Control saved_;
};
INSTANTIATE_FOR_EACH_ISA(Environment);

TEST_P(Environment, FlushingSubnormalsChangesNothing) {
  expect_same_bits_under(control() | kFlush);
}

TEST_P(Environment, TheRoundingModeChangesNothing) {
  for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
    ASSERT_EQ(std::fesetround(mode), 0);
    const Control value = control();
    ASSERT_EQ(std::fesetround(FE_TONEAREST), 0);
    expect_same_bits_under(value);
  }
}

// In a process of its own, which has not chosen yet. GoogleTest runs death tests first.
int exit_code_of_choice(const char* name, const char* expected) {
  setenv("AUTOMODEL_RMS_NORM_CPU", name, 1);
  try {
    return std::string(cpu::active_isa().name) == expected ? 0 : 1;
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}

TEST(IsaDeathTest, TheEnvironmentChooses) {
  for (const std::string& name : isa_names()) {
    EXPECT_EXIT(std::_Exit(exit_code_of_choice(name.c_str(), name.c_str())),
                ::testing::ExitedWithCode(0), "");
  }
}

TEST(IsaDeathTest, TheFastestIsTheDefault) {
  EXPECT_EXIT(std::_Exit(exit_code_of_choice("", isa_names().back().c_str())),
              ::testing::ExitedWithCode(0), "");
}

TEST(IsaDeathTest, AWrongNameInTheEnvironmentIsAnError) {
  EXPECT_EXIT(std::_Exit(exit_code_of_choice("sse9", "")), ::testing::ExitedWithCode(2),
              "'sse9' is not one .*choose from scalar");
}

TEST(Isa, ScalarIsAlwaysThereAndFirst) { EXPECT_EQ(isa_names().front(), "scalar"); }

TEST(Isa, ForceIsaChooses) {
  for (const std::string& name : isa_names()) {
    cpu::force_isa(name);
    EXPECT_EQ(cpu::active_isa().name, name);
  }
}

TEST(Isa, ForceIsaNamesTheChoices) {
  cpu::force_isa("scalar");
  try {
    cpu::force_isa("sse9");
    FAIL() << "sse9 is no instruction set of ours";
  } catch (const std::invalid_argument& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("'sse9'"), std::string::npos) << message;
    for (const std::string& name : isa_names()) {
      EXPECT_NE(message.find(name), std::string::npos) << message;
    }
  }
  EXPECT_STREQ(cpu::active_isa().name, "scalar") << "an error has to leave the choice as it was";
}

}  // namespace
}  // namespace automodel::testing
