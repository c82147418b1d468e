// How the backward pass is cut into blocks. Units, a block's part of one and slices are aligned
// subtrees of leaves, so nothing here can move a bit of grad_weight.
#pragma once

#include <algorithm>

#include "cuda/alignment.h"
#include "cuda/row_kind.h"

namespace automodel::cuda {

// Calls f(RowKind, RowShape, want) for the kernel that takes a row, with or without grad_weight;
// false where none does. Columns' sums live in registers and, by levels, in shared memory, so with
// them two blocks share a row where without them one holds it. The longest rows, and three inputs,
// are better off with more and smaller blocks.
template <class F>
bool visit_backward_kind(const numerics::BackwardParams& params, const DeviceLimits& limits, F f) {
  const int64_t hidden = params.hidden;
  const int threads = numerics::virtual_threads(hidden);
  const int small_blocks = threads / (2 * kSmallBlock);  // of two virtual threads a thread
  const bool small = small_blocks <= limits.largest_cluster &&
                     chunks_of_virtual_thread(hidden) == 2 &&
                     (threads == numerics::kMaxVirtualThreads ||
                      (threads > 2 * kLargeBlock && params.grad_sum != nullptr));
  const auto visit = [&](auto want) {
    const auto with_want = [&](auto kind, const RowShape& shape) { f(kind, shape, want); };
    if (visit_short_kind(hidden, with_want)) return true;
    if (small) {
      with_want(RowKind<4, 2, kSmallBlock, true>{}, RowShape{kSmallBlock, 1, small_blocks});
      return true;
    }
    if constexpr (want) {
      if (threads > 2 * kLargeBlock) {
        return visit_long_kind<kLargeBlock, 4, false>(hidden, limits, with_want);
      }
      return visit_long_kind<kLargeBlock, 2>(hidden, limits, with_want);
    } else {
      return visit_long_kind<kLargeBlock, 4>(hidden, limits, with_want);
    }
  };
  return params.grad_weight != nullptr ? visit(std::true_type{}) : visit(std::false_type{});
}

constexpr int64_t kUnitRows = 128;  // partial sums of 1.6% of a bfloat16 x
constexpr int64_t kManyElements = int64_t{1} << 24;
constexpr int kUnitsBatch = 8;  // units that join reads at once, all of them whole or halves

struct BackwardPlan {
  bool fused;
  numerics::Units units;
  int unit_blocks;  // that share a unit as a cluster; 1 where a cluster shares rows
  size_t shared;    // bytes of a block of the fused kernel
};

// Levels that are kept while a subtree of `leaves` (a power of two) is summed: the sum over all of
// them stays in registers.
inline int kept_levels(int64_t leaves) { return numerics::tree_levels(leaves) - 1; }

// Rows in flight for a thread of the fused kernel, as far as shared memory goes.
template <class Kind>
constexpr int backward_stages(size_t element, int inputs) {
  if (Kind::kChunks == 1) return 4;
  if (element == 4) return Kind::kChunks == 2 || (Kind::kChunks == 3 && inputs == 2) ? 2 : 1;
  return Kind::kChunks == 2 && Kind::kBlockThreads == kLargeBlock && inputs == 2 ? 3 : 2;
}

constexpr int kMaxSliceLeaves = 8;

// Units of `leaves` where `wave` of them run at once. Where the last wave would leave many places
// empty, it and a part of the wave before it are cut into halves: they fill the places better, and
// blocks that begin one after another do not all wait for memory, or leave it idle, together.
inline numerics::Units cut_last_waves(int64_t rows, int64_t leaves, int64_t wave) {
  constexpr double kFull = 0.75;   // of a wave is full enough
  constexpr double kCutToo = 0.4;  // of the last full wave
  numerics::Units units = numerics::whole_units(rows, leaves);
  const int64_t last = units.count % wave;
  if (units.count < wave || last == 0 || last >= kFull * wave) return units;
  const auto whole_waves = static_cast<int64_t>((units.count / wave - kCutToo) * wave);
  const int64_t whole = whole_waves / kUnitsBatch * kUnitsBatch;
  if (whole == 0) return units;
  const int64_t half = leaves / 2;
  const int64_t rest = numerics::leaves_in(rows) - whole * leaves;
  return {leaves, whole, whole + (rest + half - 1) / half};
}

template <class Kind>
BackwardPlan plan_fused(const numerics::BackwardParams& params, Kind, const RowShape& shape,
                        const DeviceLimits& limits) {
  const auto element = static_cast<size_t>(element_size(params.x_dtype));
  const int inputs = params.grad_sum != nullptr ? 3 : 2;
  const auto shared = [&](int64_t slice_leaves) {
    const size_t row = size_t{Kind::kChunks} * numerics::kSlots * Kind::kBlockThreads;
    const int levels = params.grad_weight != nullptr ? kept_levels(slice_leaves) : 0;
    return row *
           (inputs * element * backward_stages<Kind>(element, inputs) + sizeof(float) * levels);
  };
  const int64_t leaves = numerics::leaves_in(params.rows);
  const auto blocks = [&](int64_t slice_leaves) {
    return leaves / (slice_leaves * shape.rows) * shape.blocks;
  };
  // The longer a slice, the fewer partial sums; but a multiprocessor is to hold kLargeBlock threads
  // at least.
  constexpr int kMultiprocessorBlocks = kLargeBlock / Kind::kBlockThreads;
  const auto& together = limits.clustered[kMultiprocessorBlocks - 1];  // blocks, by doublings
  const size_t shared_limit = limits.shared_per_block / kMultiprocessorBlocks;
  const bool want_weight = params.grad_weight != nullptr;
  int64_t slice = 1;
  while (want_weight && slice < kMaxSliceLeaves && blocks(2 * slice) >= limits.multiprocessors &&
         shared(2 * slice) <= shared_limit) {
    slice *= 2;
  }
  const int64_t block_leaves = slice * shape.rows;
  // More blocks of a unit are fewer partial sums too. But a cluster begins late, which shows in
  // little work, and does not fit all multiprocessors, which can take another wave of blocks.
  int doublings = 0;
  if (want_weight && shape.blocks == 1 && params.rows * params.hidden >= kManyElements) {
    const auto waves = [&](int i) { return (blocks(slice) + together[i] - 1) / together[i]; };
    while (1 << doublings < limits.largest_cluster &&
           (block_leaves << doublings) * numerics::kLeafRows < kUnitRows &&
           8 * waves(doublings + 1) <= 9 * waves(0)) {
      ++doublings;
    }
  }
  const int unit_blocks = 1 << doublings;
  const int64_t unit_leaves = unit_blocks * block_leaves;
  // Halves cost more blocks, which begin one by one, unless another block fills that time.
  const bool cut = want_weight && slice > 1 && shape.blocks == 1 && kMultiprocessorBlocks > 1;
  const int64_t wave = together[doublings] / unit_blocks;
  const size_t bytes = shared(slice);
  return {bytes <= limits.shared_per_block,
          cut ? cut_last_waves(params.rows, unit_leaves, wave)
              : numerics::whole_units(params.rows, unit_leaves),
          unit_blocks, bytes};
}

// The kernel for rows of any length has blocks for rows and blocks for columns, in kLongSlices
// slices of a unit.
constexpr int kLongThreads = 256;
constexpr int kLongSlices = 16;
constexpr int kLongColumns = kLongThreads / kLongSlices;  // chunks across
constexpr int64_t kMaxLongSliceLeaves = 8;
constexpr int kLongBlocksPerMultiprocessor = 4;

inline int64_t columns_blocks(int64_t hidden) {
  return (numerics::chunks_in_row(hidden) + kLongColumns - 1) / kLongColumns;
}

// Elements of shared memory: the slices' trees, and where they meet.
inline int64_t columns_elements(int64_t unit_leaves) {
  return int64_t{kept_levels(unit_leaves / kLongSlices) + 1} * numerics::kSlots * kLongThreads;
}

inline BackwardPlan plan_long(const numerics::BackwardParams& params, const DeviceLimits& limits) {
  const int64_t leaves = numerics::leaves_in(params.rows);
  const int64_t columns = columns_blocks(params.hidden);
  const int64_t enough = int64_t{kLongBlocksPerMultiprocessor} * limits.multiprocessors;
  int64_t slice = 1;
  while (slice < kMaxLongSliceLeaves && leaves / (2 * slice * kLongSlices) * columns >= enough) {
    slice *= 2;
  }
  return {false, numerics::whole_units(params.rows, slice * kLongSlices), 1, 0};
}

// So few rows that the kernel for rows of any length is faster, whose blocks take one row, and not
// a leaf of them in turn.
inline bool few_rows(const numerics::BackwardParams& params) {
  constexpr int64_t kFewElements = 3 << 19;
  return params.rows <= 256 || (params.rows <= 2048 && params.rows * params.hidden <= kFewElements);
}

inline BackwardPlan plan_backward(const numerics::BackwardParams& params,
                                  const DeviceLimits& limits) {
  BackwardPlan plan = plan_long(params, limits);
  if (params.grad_x == nullptr || !rows_are_whole(params) || few_rows(params)) return plan;
  visit_backward_kind(params, limits, [&](auto kind, const RowShape& shape, auto) {
    const BackwardPlan fused = plan_fused(params, kind, shape, limits);
    if (fused.fused) plan = fused;
  });
  return plan;
}

}  // namespace automodel::cuda
