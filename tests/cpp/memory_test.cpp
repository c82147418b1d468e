// Which memory the kernels read and write: strided and unaligned rows, and nothing beside their own
// rows. Under AddressSanitizer every other test checks reads too, for its buffers have the exact
// size.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "bits.h"
#include "golden_run.h"
#include "isas.h"
#include "problems.h"

namespace automodel::testing {
namespace {

using numerics::RowLayout;

TEST(RowOffset, OfOneDimension) {
  const RowLayout layout{1, {int64_t{1} << 33}, {5}};
  EXPECT_EQ(row_offset(layout, 0), 0);
  EXPECT_EQ(row_offset(layout, 4), int64_t{1} << 35);
}

TEST(RowOffset, OfSeveralDimensions) {
  const RowLayout layout{4, {1000, 0, int64_t{1} << 32, 7}, {3, 2, 4, 5}};
  int64_t row = 0;
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t j = 0; j < 2; ++j) {
      for (int64_t k = 0; k < 4; ++k) {
        for (int64_t l = 0; l < 5; ++l, ++row) {
          ASSERT_EQ(row_offset(layout, row), i * 1000 + k * (int64_t{1} << 32) + l * 7) << row;
        }
      }
    }
  }
}

int64_t extent_of(const RowLayout& layout, int64_t hidden) {
  int64_t last = 0;
  for (int dim = 0; dim < layout.dims; ++dim) last += (layout.sizes[dim] - 1) * layout.strides[dim];
  return last + hidden;
}

// A buffer of exactly the bytes that `layout` spans from `shift` elements on, holding `rows`.
Bytes scatter(const Bytes& rows, size_t size, const RowLayout& layout, int64_t hidden,
              int64_t shift) {
  const int64_t row_bytes = static_cast<int64_t>(size) * hidden;
  Bytes result(size * static_cast<size_t>(shift + extent_of(layout, hidden)), 0xff);
  for (int64_t row = 0; row * row_bytes < static_cast<int64_t>(rows.size()); ++row) {
    const auto from = rows.begin() + row * row_bytes;
    std::copy(
        from, from + row_bytes,
        result.begin() + static_cast<int64_t>(size) * (shift + numerics::row_offset(layout, row)));
  }
  return result;
}

class Memory : public EachIsa {};
INSTANTIATE_FOR_EACH_ISA(Memory);

TEST_P(Memory, StridesDoNotChangeBits) {
  for (const int64_t hidden : {1, 16, 21, 264}) {
    // Rows of 2 x 3 x 4: a gap after each row; the outermost and innermost dimensions exchanged;
    // all rows of the last dimension at one place.
    const RowLayout layouts[] = {
        {1, {hidden + 3}, {24}},
        {3, {hidden, 2 * hidden, 6 * hidden}, {2, 3, 4}},
        {2, {hidden + 1, 0}, {6, 4}},
    };
    for (const GoldenCase& c : every_x_dtype(24, hidden)) {
      for (const RowLayout& layout : layouts) {
        SCOPED_TRACE(name_of(c, layout.dims));
        Inputs inputs = make_inputs(c, 10);
        const size_t size = size_of(c.x_dtype);
        const int64_t row_bytes = static_cast<int64_t>(size) * hidden;
        // Scatters the rows, and leaves in their place what the layout makes of them: rows at one
        // place are the last one that was written there.
        const auto scattered = [&](Bytes& rows) {
          if (rows.empty()) return rows;
          Bytes result = scatter(rows, size, layout, hidden, 1);
          for (int64_t row = 0; row < c.rows; ++row) {
            const int64_t at = static_cast<int64_t>(size) * (1 + numerics::row_offset(layout, row));
            std::copy_n(result.begin() + at, row_bytes, rows.begin() + row * row_bytes);
          }
          return result;
        };
        const Bytes x = scattered(inputs.x);
        const Bytes grad_y = scattered(inputs.grad_y);
        const Bytes residual = scattered(inputs.residual);
        const Bytes grad_sum = scattered(inputs.grad_sum);
        const Outputs expected = run(kernels(), c, inputs);

        Outputs got = make_outputs(c);
        Pointers p = pointers(inputs, got);
        p.x = x.data() + size;
        p.grad_y = grad_y.data() + size;
        if (c.residual) {
          p.residual = residual.data() + size;
          p.grad_sum = grad_sum.data() + size;
        }
        auto forward = forward_params(c, p);
        forward.x_layout = layout;
        forward.residual_layout = layout;
        kernels().forward(forward, 0, c.rows);
        auto backward = backward_params(c, p, 1);
        if (!c.residual) backward.x_layout = layout;
        backward.grad_y_layout = layout;
        backward.grad_sum_layout = layout;
        run_backward(kernels(), backward);
        expect_same(c, got, expected);
      }
    }
  }
}

// A row of grad_y that is expanded from one gradient.
TEST_P(Memory, ExpandedGradients) {
  for (const GoldenCase& c : every_x_dtype(13, 37)) {
    SCOPED_TRACE(name_of(c, 0));
    Inputs inputs = make_inputs(c, 11);
    const size_t row_bytes = size_of(c.x_dtype) * static_cast<size_t>(c.hidden);
    inputs.grad_y.resize(row_bytes);
    inputs.grad_y.shrink_to_fit();
    Outputs got = make_outputs(c);
    const Pointers p = pointers(inputs, got);
    kernels().forward(forward_params(c, p), 0, c.rows);
    auto params = backward_params(c, p, 1);
    params.grad_y_layout.strides[0] = 0;
    run_backward(kernels(), params);

    Inputs repeated = inputs;
    for (int64_t row = 1; row < c.rows; ++row) {
      repeated.grad_y.insert(repeated.grad_y.end(), inputs.grad_y.begin(), inputs.grad_y.end());
    }
    expect_same(c, got, run(kernels(), c, repeated));
  }
}

// Bytes with `kRim` bytes on both sides that nobody may touch, and all filled with one value.
class Guarded {
 public:
  Guarded(DType dtype, int64_t count, size_t shift)
      : size_(size_of(dtype)), shift_(shift * size_), count_(count), bytes_(all(), kFill) {}

  void* data() { return bytes_.data() + kRim + shift_; }

  // Only elements [begin, end) may have been written, and each of them must have been.
  void expect_written(int64_t begin, int64_t end, const char* name) const {
    const size_t first = kRim + shift_ + size_ * static_cast<size_t>(begin);
    const size_t last = kRim + shift_ + size_ * static_cast<size_t>(end);
    for (size_t i = 0; i < bytes_.size(); ++i) {
      if (i >= first && i < last) continue;
      ASSERT_EQ(bytes_[i], kFill) << name << " was written at byte "
                                  << static_cast<std::ptrdiff_t>(i - kRim - shift_);
    }
    const Bytes untouched(size_, kFill);
    for (size_t i = first; i < last; i += size_) {
      ASSERT_FALSE(std::equal(untouched.begin(), untouched.end(),
                              bytes_.begin() + static_cast<std::ptrdiff_t>(i)))
          << name << " was not written at byte " << i - kRim - shift_;
    }
  }

 private:
  static constexpr size_t kRim = 128;
  static constexpr unsigned char kFill = 0xff;  // a NaN, which no result is

  size_t all() const { return 2 * kRim + shift_ + size_ * static_cast<size_t>(count_); }

  size_t size_;
  size_t shift_;
  int64_t count_;
  Bytes bytes_;
};

// Each pointer is `shift` elements off any alignment but its own.
TEST_P(Memory, WritesTheAskedRowsAlone) {
  for (const int64_t hidden : {1, 7, 16, 17, 33, 130, 264}) {
    for (const GoldenCase& c : every_dtype(43, hidden)) {
      for (const size_t shift : {0, 1}) {
        SCOPED_TRACE(name_of(c, static_cast<int64_t>(shift)));
        const Inputs inputs = make_inputs(c, 12);
        const DType a = accumulate_dtype(c);
        Guarded y(c.x_dtype, c.rows * hidden, shift);
        Guarded rstd(a, c.rows, shift);
        Outputs rest = make_outputs(c);
        Pointers p = pointers(inputs, rest);
        p.y = y.data();
        p.rstd = rstd.data();
        Guarded sum(c.x_dtype, c.rows * hidden, shift);
        if (c.residual) p.sum = sum.data();
        kernels().forward(forward_params(c, p), 3, 20);
        y.expect_written(3 * hidden, 20 * hidden, "y");
        rstd.expect_written(3, 20, "rstd");
        sum.expect_written(c.residual ? 3 * hidden : 0, c.residual ? 20 * hidden : 0, "sum");

        const Outputs full = run(kernels(), c, inputs);
        const bool has_weight = p.weight != nullptr;
        Guarded grad_x(c.x_dtype, c.rows * hidden, shift);
        Guarded grad_weight(c.weight_dtype == DType::kNone ? a : c.weight_dtype, hidden, shift);
        p.rstd = const_cast<unsigned char*>(full.rstd.data());
        p.sum = const_cast<unsigned char*>(full.sum.data());
        p.grad_x = grad_x.data();
        p.grad_weight = has_weight ? grad_weight.data() : nullptr;
        auto params = backward_params(c, p, 2);  // 3 units: 16, 16 and 11 rows
        Guarded partials(a, params.units.count * hidden, shift);
        const int64_t scratch_count = cpu::backward_scratch_elements(params);
        Guarded scratch(a, scratch_count, shift);
        if (has_weight) params.partials = partials.data();
        kernels().backward(params, 1, 3, has_weight ? scratch.data() : nullptr);
        grad_x.expect_written(16 * hidden, 43 * hidden, "grad_x");
        partials.expect_written(has_weight ? hidden : 0, has_weight ? 3 * hidden : 0, "partials");
        if (!has_weight) continue;
        scratch.expect_written(0, scratch_count, "scratch");
        kernels().backward(params, 0, 1, scratch.data());
        kernels().join_partials(params, hidden / 3, hidden);
        grad_weight.expect_written(hidden / 3, hidden, "grad_weight");
      }
    }
  }
}

TEST_P(Memory, AlignmentDoesNotChangeBits) {
  for (const int64_t hidden : {1, 33, 264}) {
    for (const GoldenCase& c : every_dtype(11, hidden)) {
      const Inputs inputs = make_inputs(c, 13);
      const Outputs expected = run(kernels(), c, inputs);
      for (size_t shift = 1; shift < 16; shift += 3) {
        SCOPED_TRACE(name_of(c, static_cast<int64_t>(shift)));
        const auto moved = [&](const Bytes& bytes, DType dtype) {
          Bytes result(shift * size_of(dtype) + bytes.size());
          std::copy(bytes.begin(), bytes.end(),
                    result.begin() + static_cast<std::ptrdiff_t>(shift * size_of(dtype)));
          return result;
        };
        const DType a = accumulate_dtype(c);
        const DType added = c.residual ? c.x_dtype : DType::kNone;
        const Inputs in{moved(inputs.x, c.x_dtype), moved(inputs.weight, c.weight_dtype),
                        moved(inputs.grad_y, c.x_dtype), moved(inputs.residual, added),
                        moved(inputs.grad_sum, added)};
        Outputs out{moved(expected.y, c.x_dtype), moved(expected.rstd, a),
                    moved(expected.grad_x, c.x_dtype), moved(expected.grad_weight, c.weight_dtype),
                    moved(expected.sum, added)};
        const std::pair<Bytes*, DType> outputs[] = {{&out.y, c.x_dtype},
                                                    {&out.rstd, a},
                                                    {&out.grad_x, c.x_dtype},
                                                    {&out.grad_weight, c.weight_dtype},
                                                    {&out.sum, added}};
        for (auto [bytes, dtype] : outputs) std::fill(bytes->begin(), bytes->end(), 0xff);
        Pointers p = pointers(in, out);
        const auto move = [&](auto& pointer, DType dtype) {
          if (pointer == nullptr) return;
          const auto* bytes = static_cast<const unsigned char*>(pointer) + shift * size_of(dtype);
          pointer = const_cast<unsigned char*>(bytes);
        };
        for (const void** x : {&p.x, &p.grad_y, &p.residual, &p.grad_sum}) move(*x, c.x_dtype);
        for (void** x : {&p.y, &p.grad_x, &p.sum}) move(*x, c.x_dtype);
        move(p.rstd, a);
        move(p.weight, c.weight_dtype);
        move(p.grad_weight, c.weight_dtype);
        kernels().forward(forward_params(c, p), 0, c.rows);
        run_backward(kernels(), backward_params(c, p, 1));
        for (auto [bytes, dtype] : outputs) {
          bytes->erase(bytes->begin(),
                       bytes->begin() + static_cast<std::ptrdiff_t>(shift * size_of(dtype)));
        }
        expect_same(c, out, expected);
      }
    }
  }
}

}  // namespace
}  // namespace automodel::testing
