// How the backward pass is cut into blocks. Units, a block's part of one and slices are aligned
// subtrees of leaves, so nothing here can move a bit of grad_weight.
#pragma once

#include <algorithm>

#include "cuda/alignment.h"
#include "cuda/row_kind.cuh"

namespace automodel::cuda {

constexpr int kColumnsThreads = 128;
constexpr int64_t kMaxColumnsLeaves = 32;
constexpr int kColumnsBlocksPerMultiprocessor = 4;

constexpr int64_t kUnitRows = 128;  // keep the partial sums under 2% of a bfloat16 x

struct BackwardPlan {
  bool fused;
  int64_t unit_leaves;
  int unit_blocks;  // that share a unit as a cluster; 1 where a cluster shares rows
  size_t shared;    // bytes of a block of the fused kernel
};

// Levels that are kept while a subtree of `leaves` (a power of two) is summed: the sum over all of
// them stays in registers.
inline int kept_levels(int64_t leaves) { return numerics::tree_levels(leaves) - 1; }

// Rows in flight for a thread of the fused kernel.
constexpr int backward_stages(size_t element, int chunks) {
  return chunks == 1 ? 4 : chunks > 2 && element == 4 ? 1 : 2;
}

constexpr int kMaxSliceLeaves = 8;

template <class Kind>
BackwardPlan plan_fused(const numerics::BackwardParams& params, Kind, const RowShape& shape,
                        const DeviceLimits& limits) {
  const auto element = static_cast<size_t>(element_size(params.x_dtype));
  const int inputs = params.grad_sum != nullptr ? 3 : 2;
  const auto shared = [&](int64_t slice_leaves) {
    const size_t row = size_t{Kind::kChunks} * numerics::kSlots * Kind::kBlockThreads;
    const int levels = params.grad_weight != nullptr ? kept_levels(slice_leaves) : 0;
    return row *
           (inputs * element * backward_stages(element, Kind::kChunks) + sizeof(float) * levels);
  };
  const int64_t leaves = numerics::leaves_in(params.rows);
  const auto blocks = [&](int64_t slice_leaves) {
    return leaves / (slice_leaves * shape.rows) * shape.blocks;
  };
  // The longer a slice, the fewer partial sums; but a multiprocessor is to hold kLargeBlock threads
  // at least.
  const size_t shared_limit = limits.shared_per_block / (kLargeBlock / Kind::kBlockThreads);
  int64_t slice = 1;
  if (params.grad_weight != nullptr) {
    while (slice < kMaxSliceLeaves && blocks(2 * slice) >= limits.multiprocessors &&
           shared(2 * slice) <= shared_limit) {
      slice *= 2;
    }
  }
  const int64_t block_leaves = slice * shape.rows;
  int unit_blocks = 1;
  if (params.grad_weight != nullptr && limits.clusters && shape.blocks == 1 &&
      blocks(slice) >= 2 * limits.multiprocessors) {
    while (unit_blocks < kMaxCluster &&
           unit_blocks * block_leaves * numerics::kLeafRows < kUnitRows) {
      unit_blocks *= 2;
    }
  }
  const size_t bytes = shared(slice);
  return {bytes <= limits.shared_per_block, unit_blocks * block_leaves, unit_blocks, bytes};
}

// The kernel by columns: blocks across a row, and its shared memory.
inline int64_t columns_blocks(int64_t hidden) {
  const int64_t chunks = numerics::chunks_in_row(hidden);
  return (chunks + kColumnsThreads - 1) / kColumnsThreads;
}

inline int64_t columns_stack_elements(int64_t unit_leaves) {
  return int64_t{kept_levels(unit_leaves)} * numerics::kSlots * kColumnsThreads;
}

inline BackwardPlan plan_columns(const numerics::BackwardParams& params,
                                 const DeviceLimits& limits) {
  const int64_t leaves = numerics::leaves_in(params.rows);
  const int64_t columns = columns_blocks(params.hidden);
  const int64_t blocks = int64_t{kColumnsBlocksPerMultiprocessor} * limits.multiprocessors;
  int64_t unit = 1;
  while (unit < kMaxColumnsLeaves && leaves / (2 * unit) * columns >= blocks) unit *= 2;
  return {false, unit, 1, 0};
}

inline BackwardPlan plan_backward(const numerics::BackwardParams& params,
                                  const DeviceLimits& limits) {
  BackwardPlan plan = plan_columns(params, limits);
  if (params.grad_x == nullptr || !rows_are_whole(params)) return plan;
  visit_row_kind(params.hidden, limits, [&](auto kind, const RowShape& shape) {
    const BackwardPlan fused = plan_fused(params, kind, shape, limits);
    if (fused.fused) plan = fused;
  });
  return plan;
}

}  // namespace automodel::cuda
