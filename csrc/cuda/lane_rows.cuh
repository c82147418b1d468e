// The contract's row_sum of the shortest rows, several at once.
#pragma once

#include "cuda/row_sum.cuh"

namespace automodel::cuda {

// Sums over rows of kMinVirtualThreads lanes, of kRows rows (a power of two) at once: at each step
// of join_lanes a lane hands over half of the rows that it still has and keeps the others, so all
// rows take little more than one does. In the end a lane has the sum of row row_of(lane).
template <int kPieces, int kRows>
struct LaneRows {
  static constexpr int kSteps = 4;
  static_assert(1 << kSteps == numerics::kMinVirtualThreads && kRows <= 1 << kSteps);

  // Between the two lanes that a step adds.
  static constexpr __device__ int distance(int step) {
    return kPieces == 2 ? (step == 0 ? 1 : 16 >> step) : 8 >> step;
  }

  template <class A>
  static __device__ __forceinline__ A join(A (&value)[kRows][1]) {
    int rows = kRows;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const bool upper = (threadIdx.x & distance(step)) != 0;
      if (rows == 1) {
        value[0][0] =
            numerics::add(value[0][0], __shfl_xor_sync(kAllLanes, value[0][0], distance(step)));
        continue;
      }
      rows /= 2;
#pragma unroll
      for (int r = 0; r < kRows / 2; ++r) {
        if (r >= rows) break;
        const A own = upper ? value[rows + r][0] : value[r][0];
        const A other = upper ? value[r][0] : value[rows + r][0];
        value[r][0] = numerics::add(own, __shfl_xor_sync(kAllLanes, other, distance(step)));
      }
    }
    return numerics::finish_sum(value[0][0]);
  }

  static __device__ __forceinline__ int row_of(int lane) {
    int row = 0;
#pragma unroll
    for (int step = 0; kRows >> step > 1; ++step) {
      if (lane & distance(step)) row += kRows >> (step + 1);
    }
    return row;
  }
  // The first of a row's lanes.
  static constexpr __device__ int lane_of(int row) {
    int lane = 0;
    for (int step = 0; kRows >> step > 1; ++step) {
      if (row & kRows >> (step + 1)) lane += distance(step);
    }
    return lane;
  }
};

}  // namespace automodel::cuda
