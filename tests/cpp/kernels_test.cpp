// P3, P4, P5 of the kernels: what bits may not depend on.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <random>

#include "bits.h"
#include "golden_run.h"
#include "isas.h"
#include "numerics/arithmetic.h"
#include "problems.h"

namespace automodel::testing {
namespace {

using numerics::kLeafRows;

class Kernels : public EachIsa {};
INSTANTIATE_FOR_EACH_ISA(Kernels);

TEST_P(Kernels, GiveTheScalarBits) {
  std::mt19937 random(1);
  for (const int64_t hidden : kWidths) {
    for (const GoldenCase& c : every_dtype(1 + random() % 20, hidden)) {
      const Inputs inputs = make_inputs(c, random());
      SCOPED_TRACE(name_of(c, 0));
      expect_same(c, run(kernels(), c, inputs), run(cpu::kScalarKernels, c, inputs));
    }
  }
}

TEST_P(Kernels, GiveTheScalarBitsAtRandomWidths) {
  std::mt19937 random(2);
  for (int round = 0; round < 20; ++round) {
    for (const GoldenCase& c : every_dtype(1 + random() % 40, 1 + random() % 700)) {
      const Inputs inputs = make_inputs(c, random());
      SCOPED_TRACE(name_of(c, 0));
      expect_same(c, run(kernels(), c, inputs), run(cpu::kScalarKernels, c, inputs));
    }
  }
}

// With a residual: what the sum, normalised on its own, gives.
TEST_P(Kernels, NormaliseTheSum) {
  for (const int64_t hidden : kWidths) {
    for (GoldenCase c : every_dtype(11, hidden)) {
      if (!c.residual) continue;
      SCOPED_TRACE(name_of(c, 0));
      Inputs inputs = make_inputs(c, 14);
      const Outputs got = run(kernels(), c, inputs);
      numerics::visit_x(c.x_dtype, [&](auto type) {
        using X = typename decltype(type)::type;
        using A = numerics::Accumulate<X>;
        for (size_t at = 0; at < inputs.x.size(); at += sizeof(X)) {
          X x, residual;
          memcpy(&x, inputs.x.data() + at, sizeof(X));
          memcpy(&residual, inputs.residual.data() + at, sizeof(X));
          const X sum = numerics::round_to<X>(
              numerics::add(numerics::to_accumulate<A>(x), numerics::to_accumulate<A>(residual)));
          memcpy(inputs.x.data() + at, &sum, sizeof(X));
        }
      });
      c.residual = false;
      inputs.residual.clear();
      inputs.grad_sum.clear();
      const Outputs plain = run(kernels(), c, inputs);
      EXPECT_TRUE(same_bits(got.sum, inputs.x, c.x_dtype)) << "sum";
      EXPECT_TRUE(same_bits(got.y, plain.y, c.x_dtype)) << "y";
      EXPECT_TRUE(same_bits(got.rstd, plain.rstd, accumulate_dtype(c))) << "rstd";
      EXPECT_TRUE(same_bits(got.grad_weight, plain.grad_weight, c.weight_dtype)) << "grad_weight";
    }
  }
}

// All 65536 values, infinities and NaNs among them, as x, weight and grad_y.
TEST_P(Kernels, GiveTheScalarBitsForEveryPattern) {
  for (const GoldenCase& c : every_x_dtype(65536 / 8, 8)) {
    if (size_of(c.x_dtype) != 2) continue;
    Inputs inputs = make_inputs(c, 0);
    for (int pattern = 0; pattern < 65536; ++pattern) {
      const auto bits = static_cast<uint16_t>(pattern);
      const auto mixed = static_cast<uint16_t>(pattern * 40503);
      memcpy(inputs.x.data() + 2 * pattern, &bits, 2);
      memcpy(inputs.grad_y.data() + 2 * pattern, &mixed, 2);
      if (!c.residual) continue;
      memcpy(inputs.residual.data() + 2 * pattern, &mixed, 2);
      memcpy(inputs.grad_sum.data() + 2 * pattern, &bits, 2);
    }
    SCOPED_TRACE(name_of(c, 0));
    expect_same(c, run(kernels(), c, inputs), run(cpu::kScalarKernels, c, inputs));
  }
}

Bytes rows_of(const Bytes& bytes, int64_t row_bytes, int64_t begin, int64_t end) {
  return Bytes(bytes.begin() + begin * row_bytes, bytes.begin() + end * row_bytes);
}

TEST_P(Kernels, RowsDoNotDependOnTheirBatch) {
  for (const int64_t hidden : {1, 17, 130, 1032}) {
    for (const GoldenCase& c : every_dtype(9, hidden)) {
      SCOPED_TRACE(name_of(c, 0));
      const Inputs inputs = make_inputs(c, 3);
      const Outputs all = run(kernels(), c, inputs);
      const auto row_bytes = static_cast<int64_t>(size_of(c.x_dtype)) * hidden;
      const auto a_bytes = static_cast<int64_t>(size_of(accumulate_dtype(c)));
      GoldenCase one = c;
      one.rows = 1;
      for (int64_t row = 0; row < c.rows; ++row) {
        const auto own = [&](const Bytes& bytes) {
          return bytes.empty() ? bytes : rows_of(bytes, row_bytes, row, row + 1);
        };
        const Outputs alone = run(kernels(), one,
                                  {own(inputs.x), inputs.weight, own(inputs.grad_y),
                                   own(inputs.residual), own(inputs.grad_sum)});
        EXPECT_EQ(alone.sum, own(all.sum)) << row;
        EXPECT_EQ(alone.y, rows_of(all.y, row_bytes, row, row + 1)) << row;
        EXPECT_EQ(alone.rstd, rows_of(all.rstd, a_bytes, row, row + 1)) << row;
        EXPECT_EQ(alone.grad_x, rows_of(all.grad_x, row_bytes, row, row + 1)) << row;
      }
    }
  }
}

TEST_P(Kernels, NanAndInfinityStayInTheirRow) {
  for (GoldenCase c : every_x_dtype(6, 140)) {
    SCOPED_TRACE(name_of(c, 0));
    Inputs inputs = make_inputs(c, 4);
    const Outputs clean = run(kernels(), c, inputs);
    const auto row_bytes = static_cast<int64_t>(size_of(c.x_dtype)) * c.hidden;
    // All bits set is a NaN in every type.
    memset(inputs.x.data() + 2 * row_bytes, 0xff, static_cast<size_t>(row_bytes));
    memset(inputs.grad_y.data() + 4 * row_bytes, 0xff, static_cast<size_t>(row_bytes));
    const Outputs spoilt = run(kernels(), c, inputs);
    for (const int64_t row : {0, 1, 3, 5}) {
      EXPECT_EQ(rows_of(spoilt.y, row_bytes, row, row + 1),
                rows_of(clean.y, row_bytes, row, row + 1));
      EXPECT_EQ(rows_of(spoilt.grad_x, row_bytes, row, row + 1),
                rows_of(clean.grad_x, row_bytes, row, row + 1));
    }
  }
}

// Squares that underflow make rstd infinite, and what pads a row must not become 0 * infinity.
TEST_P(Kernels, PaddingStaysZeroWhereRstdIsInfinite) {
  for (const int64_t hidden : kWidths) {
    GoldenCase c{2, hidden, DType::kFloat32, DType::kNone, false, 0.0, {}};
    Inputs inputs = make_inputs(c, 0);
    for (size_t i = 0; i < inputs.x.size(); i += sizeof(float)) {
      const float x = 0x1p-100f;
      const float grad_y = 1.0f;
      memcpy(inputs.x.data() + i, &x, sizeof(x));
      memcpy(inputs.grad_y.data() + i, &grad_y, sizeof(grad_y));
    }
    const Outputs outputs = run(kernels(), c, inputs);
    for (int64_t i = 0; i < c.rows * hidden; ++i) {
      ASSERT_EQ(bits_at(outputs.y, c.x_dtype, i), 0x7f800000u) << hidden << " at " << i;
      ASSERT_EQ(bits_at(outputs.grad_x, c.x_dtype, i), 0xff800000u) << hidden << " at " << i;
    }
  }
}

TEST_P(Kernels, DoNotDependOnHowTheWorkIsSplit) {
  std::mt19937 random(5);
  for (const GoldenCase& c : every_dtype(53, 75)) {
    SCOPED_TRACE(name_of(c, 0));
    const Inputs inputs = make_inputs(c, 5);
    const Outputs whole = run(kernels(), c, inputs, 2);
    Outputs pieces = make_outputs(c);
    const Pointers p = pointers(inputs, pieces);
    const auto forward = forward_params(c, p);
    for (int64_t begin = 0, end; begin < c.rows; begin = end) {
      end = std::min<int64_t>(c.rows, begin + 1 + random() % 9);
      kernels().forward(forward, begin, end);
    }
    auto backward = backward_params(c, p, 2);
    Bytes partials = buffer(accumulate_dtype(c), backward.units.count * c.hidden);
    if (backward.grad_weight != nullptr) backward.partials = partials.data();
    for (int64_t begin = 0, end; begin < backward.units.count; begin = end) {
      end = std::min<int64_t>(backward.units.count, begin + 1 + random() % 2);
      Bytes scratch = buffer(accumulate_dtype(c), cpu::backward_scratch_elements(backward));
      kernels().backward(backward, begin, end, scratch.data());
    }
    for (int64_t begin = 0, end; backward.grad_weight != nullptr && begin < c.hidden; begin = end) {
      end = std::min<int64_t>(c.hidden, begin + 1 + random() % 20);
      kernels().join_partials(backward, begin, end);
    }
    expect_same(c, pieces, whole);
  }
}

TEST_P(Kernels, GradWeightDoesNotDependOnTheUnit) {
  for (const int64_t rows : {1, 8, 9, 64, 103, 530}) {
    for (const GoldenCase& c : every_x_dtype(rows, 35)) {
      SCOPED_TRACE(name_of(c, 0));
      const Inputs inputs = make_inputs(c, 6);
      const Outputs expected = run(cpu::kScalarKernels, c, inputs, 1);
      for (int64_t unit_leaves = 1; unit_leaves <= 128; unit_leaves *= 2) {
        SCOPED_TRACE(unit_leaves);
        expect_same(c, run(kernels(), c, inputs, unit_leaves), expected);
      }
    }
  }
}

TEST_P(Kernels, TrailingRowsWithoutGradientChangeNoGradWeight) {
  for (GoldenCase c : every_x_dtype(21, 35)) {
    SCOPED_TRACE(name_of(c, 0));
    const Inputs inputs = make_inputs(c, 7);
    const Outputs expected = run(kernels(), c, inputs);
    for (c.rows = 22; c.rows < 80; ++c.rows) {
      Inputs longer = make_inputs(c, 7);  // the first rows are the same ones
      std::copy(inputs.grad_y.begin(), inputs.grad_y.end(), longer.grad_y.begin());
      std::fill(longer.grad_y.begin() + static_cast<std::ptrdiff_t>(inputs.grad_y.size()),
                longer.grad_y.end(), 0);
      ASSERT_TRUE(
          same_bits(run(kernels(), c, longer).grad_weight, expected.grad_weight, c.weight_dtype))
          << c.rows;
    }
  }
}

TEST_P(Kernels, NoRowsGiveZeroGradWeight) {
  for (const GoldenCase& c : every_dtype(0, 35)) {
    Outputs outputs = make_outputs(c);
    std::fill(outputs.grad_weight.begin(), outputs.grad_weight.end(), 0xff);
    const Inputs inputs = make_inputs(c, 8);
    run_backward(kernels(), backward_params(c, pointers(inputs, outputs), 1));
    EXPECT_EQ(outputs.grad_weight, buffer(c.weight_dtype, c.hidden)) << name_of(c, 0);
  }
}

// Each product underflows to -0, and so would their sum.
TEST_P(Kernels, GradWeightIsNeverMinusZero) {
  for (const int64_t rows : {1, 8, 9, 33}) {
    const GoldenCase c{rows, 16, DType::kFloat32, DType::kFloat32, false, 0.0, {}};
    Inputs inputs = make_inputs(c, 0);
    for (size_t i = 0; i < inputs.x.size() / sizeof(float); ++i) {
      const float x = i % 16 == 0 ? 4.0f : 0.25f;
      const float grad_y = -0x1p-149f;
      memcpy(inputs.x.data() + i * sizeof(float), &x, sizeof(x));
      memcpy(inputs.grad_y.data() + i * sizeof(float), &grad_y, sizeof(grad_y));
    }
    const Bytes grad_weight = run(kernels(), c, inputs).grad_weight;
    for (int64_t i = 1; i < c.hidden; ++i) {
      ASSERT_EQ(bits_at(grad_weight, c.weight_dtype, i), 0u) << rows << " rows, column " << i;
    }
  }
}

TEST_P(Kernels, OutputsThatNobodyAskedForChangeNoOther) {
  for (const GoldenCase& c : every_dtype(21, 75)) {
    SCOPED_TRACE(name_of(c, 0));
    const Inputs inputs = make_inputs(c, 9);
    const Outputs expected = run(kernels(), c, inputs);
    Outputs got = make_outputs(c);
    Pointers p = pointers(inputs, got);
    auto forward = forward_params(c, p);
    forward.rstd = nullptr;
    kernels().forward(forward, 0, c.rows);
    EXPECT_TRUE(same_bits(got.y, expected.y, c.x_dtype));

    got.rstd = expected.rstd;
    p = pointers(inputs, got);
    auto only_weight = backward_params(c, p, 2);
    only_weight.grad_x = nullptr;
    if (only_weight.grad_weight != nullptr) run_backward(kernels(), only_weight);
    auto only_x = backward_params(c, p, 2);
    only_x.grad_weight = nullptr;
    run_backward(kernels(), only_x);
    expect_same(c, got, expected);
  }
}

}  // namespace
}  // namespace automodel::testing
