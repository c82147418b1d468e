// How the backward pass is cut into blocks, on GPUs that are not at hand too.
#include <gtest/gtest.h>

#include <string>
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
    {"H200", {132, 227 * kKiB - kStaticShared, true, 8, {132, 132, 128, 120}}},
    {"B200", {148, 227 * kKiB - kStaticShared, true, 8, {148, 148, 144, 128}}},
    {"a slice of an H200", {16, 227 * kKiB - kStaticShared, true, 2, {16, 16}}},
    {"A100", {108, 163 * kKiB - kStaticShared, false, 1, {108}}},
    {"L4", {58, 99 * kKiB - kStaticShared, false, 1, {58}}},
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

std::vector<Case> cases() {
  alignas(16) static unsigned char memory[16];
  std::vector<Case> result;
  for (const Gpu& gpu : kGpus) {
    for (const int64_t hidden : widths()) {
      for (const int64_t rows : {1, 8, 257, 2061, 4096, 32768, 1 << 20}) {
        for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
          for (const int inputs : {0, 1, 2, 3}) {
            BackwardParams params{};
            params.rows = rows;
            params.hidden = hidden;
            params.x_dtype = params.weight_dtype = dtype;
            params.x = params.grad_y = params.weight = params.grad_x = memory;
            if (inputs % 2 == 1) params.grad_sum = memory;
            if (inputs / 2 == 1) params.grad_weight = memory;
            for (auto* layout :
                 {&params.x_layout, &params.grad_y_layout, &params.grad_sum_layout}) {
              *layout = {1, {hidden}, {rows}};
            }
            result.push_back({gpu, params});
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
    EXPECT_TRUE(is_power_of_two(plan.unit_leaves));
    EXPECT_TRUE(is_power_of_two(plan.unit_blocks));
    EXPECT_EQ(plan.unit_leaves % plan.unit_blocks, 0);
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

// As docs/performance.md states it for an H200: 2% of x, but with a residual above 6144.
TEST(Plan, PartialSumsOfManyShortRowsAreFew) {
  for (const Case& c : cases()) {
    const BackwardParams& params = c.params;
    if (c.gpu.name != std::string("H200") || params.grad_weight == nullptr) continue;
    if (params.rows < 32768 || params.hidden >= 8192) continue;
    SCOPED_TRACE(c.name());
    const BackwardPlan plan = plan_backward(params, c.gpu.limits);
    const int64_t unit_bytes =
        plan.unit_leaves * numerics::kLeafRows * numerics::element_size(params.x_dtype);
    const bool long_with_residual = params.grad_sum != nullptr && params.hidden > 6144;
    EXPECT_LE(sizeof(float), (long_with_residual ? 0.04 : 0.02) * static_cast<double>(unit_bytes));
  }
}

}  // namespace
}  // namespace automodel::cuda
