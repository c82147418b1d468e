// The contract's column_sum in a thread: the aligned binary tree over leaves, its levels in shared
// memory that belongs to this thread alone.
#pragma once

#include "cuda/chunk.cuh"

namespace automodel::cuda {

// Sums of kElements columns. Element e of level l is at (l * kElements + e) * stride: neighbouring
// threads touch neighbouring words.
template <class A, int kElements>
struct TreeStack {
  A* level;  // this thread's first element
  int stride;

  // Joins leaf number `index` with the finished subtrees before it. On return `leaf` holds the sum
  // over the largest aligned subtree that ends with this leaf; `keep` says whether a later leaf or
  // total needs it.
  __device__ __forceinline__ void push(A (&leaf)[kElements], int64_t index, bool keep) {
    const int depth = numerics::tree_depth(index);
    for (int l = 0; l < depth; ++l) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        leaf[e] = numerics::add(level[(l * kElements + e) * stride], leaf[e]);
      }
    }
    if (!keep) return;
#pragma unroll
    for (int e = 0; e < kElements; ++e) level[(depth * kElements + e) * stride] = leaf[e];
  }

  // The sum over `count` leaves that were all kept.
  __device__ __forceinline__ void total(A (&sum)[kElements], int64_t count) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) sum[e] = A(0);
    for (int l = 0; count >> l != 0; ++l) {
      if (!((count >> l) & 1)) continue;
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        sum[e] = numerics::add(level[(l * kElements + e) * stride], sum[e]);
      }
    }
  }
};

// Joins the columns of a block's slices, (threads, slices) with a power of two of slices, as an
// aligned tree; slice 0 gets the total. Overwrites the stack's first level.
template <class A, int kElements>
__device__ __forceinline__ void join_slices(A (&column)[kElements], TreeStack<A, kElements> stack) {
  const int slice = threadIdx.y;
  for (int step = 1; step < blockDim.y; step *= 2) {
    if (slice % (2 * step) == step) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) stack.level[e * stack.stride] = column[e];
    }
    __syncthreads();
    if (slice % (2 * step) == 0) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        column[e] = numerics::add(column[e], stack.level[e * stack.stride + step * blockDim.x]);
      }
    }
  }
}

}  // namespace automodel::cuda
