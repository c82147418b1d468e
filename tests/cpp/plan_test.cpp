// How the backward pass is cut into blocks, on GPUs that are not at hand too.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "cuda/backward_plan.h"

namespace automodel::cuda {
namespace {

using numerics::BackwardParams;
using numerics::DType;

constexpr size_t kKiB = 1024;

struct Gpu {
  const char* name;
  DeviceLimits limits;
};
// How many clusters fit was not measured.
const Gpu kGpus[] = {
    {"H200",
     {132, 227 * kKiB - kStaticShared, true, 8, {{132, 132, 128, 120}, {264, 264, 264, 248}}}},
    {"B200",
     {148, 227 * kKiB - kStaticShared, true, 8, {{148, 148, 144, 128}, {296, 296, 296, 272}}}},
    {"a slice of an H200", {16, 227 * kKiB - kStaticShared, true, 2, {{16, 16}, {32, 32}}}},
    {"A100", {108, 163 * kKiB - kStaticShared, false, 1, {{108}, {216}}}},
    {"L4", {58, 99 * kKiB - kStaticShared, false, 1, {{58}, {116}}}},
};

struct Case {
  Gpu gpu;
  BackwardParams params;

  std::string name() const {
    return std::string(gpu.name) + ", " + std::to_string(params.rows) + " x " +
           std::to_string(params.hidden) +
           (params.x_dtype == DType::kBFloat16 ? ", bfloat16" : ", float32") +
           (params.grad_sum != nullptr ? ", residual" : "") +
           (params.grad_weight != nullptr ? "" : ", weight frozen");
  }
};

// Rows of two to four chunks of each number of virtual threads, whole and one short; more than the
// most too.
std::vector<int64_t> widths() {
  std::vector<int64_t> result = {8, 128, 65536, 131072};
  for (int threads = numerics::kMinVirtualThreads; threads <= numerics::kMaxVirtualThreads;
       threads *= 2) {
    for (int chunks : {2 * threads, 3 * threads - 1, 3 * threads, 4 * threads - 1}) {
      result.push_back(int64_t{chunks} * numerics::kSlots);
    }
  }
  return result;
}

BackwardParams params_of(int64_t rows, int64_t hidden, DType dtype, bool residual,
                         bool want_weight) {
  alignas(16) static unsigned char memory[16];
  BackwardParams params{};
  params.rows = rows;
  params.hidden = hidden;
  params.x_dtype = params.weight_dtype = dtype;
  params.x = params.grad_y = params.weight = params.grad_x = memory;
  if (residual) params.grad_sum = memory;
  if (want_weight) params.grad_weight = memory;
  for (auto* layout : {&params.x_layout, &params.grad_y_layout, &params.grad_sum_layout}) {
    *layout = {1, {hidden}, {rows}};
  }
  return params;
}

std::vector<Case> cases() {
  std::vector<Case> result;
  for (const Gpu& gpu : kGpus) {
    for (const int64_t hidden : widths()) {
      for (const int64_t rows : {1, 8, 257, 2061, 4096, 10569, 32768, 40009, 43690, 1 << 20}) {
        for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
          for (const bool residual : {false, true}) {
            for (const bool want_weight : {false, true}) {
              result.push_back({gpu, params_of(rows, hidden, dtype, residual, want_weight)});
            }
          }
        }
      }
    }
  }
  return result;
}

bool is_power_of_two(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

TEST(Plan, IsOneThatTheGpuCanLaunch) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name());
    const BackwardPlan plan = plan_backward(c.params, c.gpu.limits);
    EXPECT_TRUE(is_power_of_two(plan.units.leaves));
    EXPECT_TRUE(is_power_of_two(plan.unit_blocks));
    EXPECT_EQ(numerics::leaves_of(plan.units, plan.units.count - 1) % plan.unit_blocks, 0);
    EXPECT_LE(plan.unit_blocks, c.gpu.limits.largest_cluster);
    EXPECT_LE(plan.shared, c.gpu.limits.shared_per_block);
    if (!plan.fused) continue;
    int kinds = 0;
    visit_backward_kind(c.params, c.gpu.limits, [&](auto kind, const RowShape& shape, auto) {
      using Kind = decltype(kind);
      ++kinds;
      EXPECT_EQ(shape.threads * shape.rows, Kind::kBlockThreads);
      EXPECT_LE(shape.blocks, c.gpu.limits.largest_cluster);
      EXPECT_EQ(shape.blocks > 1, Kind::kSpread);
      EXPECT_TRUE(shape.blocks == 1 || plan.unit_blocks == 1);
      const int64_t along = int64_t{shape.threads} * shape.blocks;  // threads of a row
      EXPECT_EQ(along * Kind::kVirtual, numerics::virtual_threads(c.params.hidden));
      const int64_t chunks = numerics::chunks_in_row(c.params.hidden);
      EXPECT_GE(along * Kind::kChunks, chunks);
      EXPECT_LT(along * (Kind::kChunks - Kind::kVirtual), chunks);
    });
    EXPECT_EQ(kinds, 1);
  }
}

TEST(Plan, UnitsAreAlignedSubtreesOfAllRows) {
  int cut = 0;
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name());
    const numerics::Units units = plan_backward(c.params, c.gpu.limits).units;
    int64_t leaf = 0;
    for (int64_t unit = 0; unit < units.count; ++unit) {
      ASSERT_EQ(numerics::first_leaf_of(units, unit), leaf);
      ASSERT_EQ(leaf % numerics::leaves_of(units, unit), 0);
      ASSERT_LT(leaf, numerics::leaves_in(c.params.rows));
      leaf += numerics::leaves_of(units, unit);
    }
    ASSERT_GE(leaf, numerics::leaves_in(c.params.rows));
    if (units.whole == units.count) continue;
    ++cut;
    EXPECT_EQ(units.whole % kUnitsBatch, 0);
    EXPECT_GT(units.whole, 0);
  }
  EXPECT_GT(cut, 0);
}

// The shapes of tests/test_cuda_kinds.py.
TEST(Plan, CutsTheShapesThatAreTestedForTheirBits) {
  for (const auto& [hidden, dtype] : {std::pair<int64_t, DType>{1152, DType::kBFloat16},
                                      {3072, DType::kFloat16},
                                      {5120, DType::kBFloat16},
                                      {2048, DType::kFloat32}}) {
    SCOPED_TRACE(hidden);
    const DeviceLimits& h200 = kGpus[0].limits;
    const int64_t side_by_side = 256 / numerics::virtual_threads(hidden);
    const BackwardParams params =
        params_of(80 * h200.multiprocessors * side_by_side + 5, hidden, dtype, false, true);
    const numerics::Units units = plan_backward(params, h200).units;
    EXPECT_LT(units.whole, units.count);
  }
}

TEST(Plan, CutsTheLastWavesWhereTheyWouldLeavePlacesEmpty) {
  constexpr int64_t kLeaves = 16;
  constexpr int64_t kRows = kLeaves * numerics::kLeafRows;
  const auto units = [](int64_t count) { return cut_last_waves(count * kRows, kLeaves, 64); };
  for (const int64_t whole : {1, 63, 64, 112, 127, 128, 176, 192}) {
    EXPECT_EQ(units(whole), numerics::whole_units(whole * kRows, kLeaves)) << whole;
  }
  EXPECT_EQ(units(65), (numerics::Units{kLeaves, 32, 98}));
  EXPECT_EQ(units(111), (numerics::Units{kLeaves, 32, 190}));
  EXPECT_EQ(units(129), (numerics::Units{kLeaves, 96, 162}));
  EXPECT_EQ(units(160), (numerics::Units{kLeaves, 96, 224}));
  EXPECT_EQ(cut_last_waves(65 * kRows - 1, kLeaves, 60), (numerics::Units{kLeaves, 32, 98}));
  EXPECT_EQ(cut_last_waves(5 * kRows, kLeaves, 4), numerics::whole_units(5 * kRows, kLeaves));
}

// As docs/performance.md states it for an H200: 2% of x, where units are cut into halves 2.7%, and
// 4% with a residual above 6144.
TEST(Plan, PartialSumsOfManyShortRowsAreFew) {
  for (const Case& c : cases()) {
    const BackwardParams& params = c.params;
    if (c.gpu.name != std::string("H200") || params.grad_weight == nullptr) continue;
    if (params.rows < 32768 || params.hidden >= 8192) continue;
    SCOPED_TRACE(c.name());
    const BackwardPlan plan = plan_backward(params, c.gpu.limits);
    const double x_bytes = static_cast<double>(params.rows * element_size(params.x_dtype));
    const bool long_with_residual = params.grad_sum != nullptr && params.hidden > 6144;
    const bool cut = plan.units.whole < plan.units.count;
    EXPECT_LE(sizeof(float) * static_cast<double>(plan.units.count), (long_with_residual ? 0.04
                                                                      : cut              ? 0.027
                                                                                         : 0.02) *
                                                                         x_bytes);
  }
}

}  // namespace
}  // namespace automodel::cuda
