// The contract's row_sum in a block: slots, then lanes, then warps. A warp holds one group of
// virtual threads, or two groups of 16 where T is 16.
#pragma once

#include "cuda/chunk.cuh"

namespace automodel::cuda {

using numerics::kGroup;

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxBlockThreads = 1024;
static_assert(kWarp == kGroup, "a warp holds a group of virtual threads");

template <class A>
__device__ __forceinline__ A join_slots(const A (&s)[kSlots]) {
  using numerics::add;
  return add(add(add(s[0], s[4]), add(s[2], s[6])), add(add(s[1], s[5]), add(s[3], s[7])));
}

// Every lane gets the sum of its `width` neighbours, by halves.
template <class A>
__device__ __forceinline__ A join_lanes(A value, int width) {
  for (int half = width / 2; half > 0; half /= 2) {
    value = numerics::add(value, __shfl_xor_sync(kAllLanes, value, half));
  }
  return value;
}

// Every lane gets the sum of the groups' sums, by halves.
template <class A>
__device__ __forceinline__ A join_groups(const A* sums, int groups) {
  static_assert(numerics::kMaxGroups == 4 * kWarp, "at most four sums a lane");
  using numerics::add;
  const int lane = threadIdx.x % kWarp;
  A value = sums[lane % min(groups, kWarp)];
  if (groups == 2 * kWarp) value = add(value, sums[lane + kWarp]);
  if (groups == 4 * kWarp) {
    value =
        add(add(value, sums[lane + 2 * kWarp]), add(sums[lane + kWarp], sums[lane + 3 * kWarp]));
  }
  return join_lanes(value, min(groups, kWarp));
}

// row_sum from each thread's joined slots, for blocks of (T, rows) threads. `sums` has room for one
// value a warp; the caller passes other memory for the next row, so that one barrier a row is
// enough.
template <class A>
__device__ __forceinline__ A join_row(A value, A* sums) {
  const int threads = blockDim.x;
  value = join_lanes(value, min(threads, kWarp));
  if (threads > kWarp) {
    const int groups = threads / kWarp;
    A* const row_sums = sums + threadIdx.y * groups;
    if (threadIdx.x % kWarp == 0) row_sums[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = join_groups(row_sums, groups);
  }
  return numerics::finish_sum(value);
}

// row_sum of a row of any length by one block of (threads, 1): a warp takes whole groups in turn.
// A block that goes on to another row needs a barrier in between. accumulate(slots, chunk) adds a
// chunk's terms to the thread's slots.
template <class A, class Accumulate>
__device__ __forceinline__ A long_row_sum(int64_t hidden, const Accumulate& accumulate) {
  __shared__ A sums[numerics::kMaxGroups];
  const int threads = numerics::virtual_threads(hidden);
  const int64_t chunks = numerics::chunks_in_row(hidden);
  const int groups = max(threads / kGroup, 1);
  const int lane = threadIdx.x % kWarp;
  for (int group = threadIdx.x / kWarp; group < groups; group += blockDim.x / kWarp) {
    A slots[kSlots] = {};
    if (lane < threads) {
      for (int64_t chunk = group * kGroup + lane; chunk < chunks; chunk += threads) {
        accumulate(slots, chunk);
      }
    }
    const A value = join_lanes(join_slots(slots), min(threads, kWarp));
    if (lane == 0) sums[group] = value;
  }
  __syncthreads();
  return numerics::finish_sum(join_groups(sums, groups));
}

// Blocks for long rows, which they take in turn.
inline unsigned long_row_blocks(int64_t rows) {
  constexpr int64_t kMaxGrid = 0x7fffffff;
  return static_cast<unsigned>(rows < kMaxGrid ? rows : kMaxGrid);
}

// Threads of a block for a long row.
inline int long_row_threads(int64_t hidden) {
  const int threads = numerics::virtual_threads(hidden);
  return threads < kWarp ? kWarp : threads > kMaxBlockThreads ? kMaxBlockThreads : threads;
}

}  // namespace automodel::cuda
