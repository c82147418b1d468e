// How the backward pass is cut into blocks. Units and slices are aligned subtrees of leaves, so
// nothing here can move a bit of grad_weight.
#pragma once

#include <algorithm>

#include "numerics/params.h"
#include "numerics/spec.h"

namespace automodel::cuda {

constexpr int kFusedSmallBlock = 256;
constexpr int kFusedLargeBlock = 512;
constexpr int kMaxSliceLeaves = 8;
constexpr int kColumnsThreads = 128;
constexpr int64_t kMaxColumnsLeaves = 32;
constexpr int kJoinColumns = 32;
constexpr int kJoinRuns = 32;
constexpr int kMaxRunLevels = 28;              // of a run of units, more than memory has rows
constexpr int64_t kMaxStackBytes = 96 * 1024;  // every GPU from sm_80 on grants a block 99 KiB
constexpr int kBlocksPerMultiprocessor = 4;    // wanted, to keep all of them busy to the end

// The fused kernel holds a row in at most 4 chunks a thread.
inline bool backward_is_fused(const numerics::BackwardParams& params) {
  return params.grad_x != nullptr && params.x_dtype != numerics::DType::kFloat64 &&
         numerics::virtual_threads(params.hidden) <= kFusedLargeBlock;
}

inline int fused_threads(int64_t hidden) { return numerics::virtual_threads(hidden); }

inline int fused_slices(int64_t hidden) {
  return std::max(1, kFusedSmallBlock / fused_threads(hidden));
}

inline int fused_chunks(int64_t hidden) {
  const int64_t threads = fused_threads(hidden);
  return std::max(2, static_cast<int>((numerics::chunks_in_row(hidden) + threads - 1) / threads));
}

// Levels that are kept while a subtree of `leaves` (a power of two) is summed: the sum over all of
// them stays in registers.
inline int kept_levels(int64_t leaves) { return numerics::tree_levels(leaves) - 1; }

// Shared memory of a block: the levels that each slice keeps, and room to join the slices.
inline int64_t fused_stack_elements(int64_t hidden, int chunks, int64_t unit_leaves) {
  const int slices = fused_slices(hidden);
  const int levels = std::max(kept_levels(unit_leaves / slices), slices > 1 ? 1 : 0);
  return int64_t{levels} * chunks * numerics::kSlots * fused_threads(hidden) * slices;
}

// The kernel by columns: blocks across a row, and its shared memory.
inline int64_t columns_blocks(int64_t hidden) {
  const int64_t chunks = numerics::chunks_in_row(hidden);
  return (chunks + kColumnsThreads - 1) / kColumnsThreads;
}

inline int64_t columns_stack_elements(int64_t unit_leaves) {
  return int64_t{kept_levels(unit_leaves)} * numerics::kSlots * kColumnsThreads;
}

}  // namespace automodel::cuda
