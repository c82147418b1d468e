// The contract's column_sum in a thread: the aligned binary tree over leaves, its levels in shared
// memory that belongs to this thread alone.
#pragma once

#include "cuda/chunk.cuh"
#include "cuda/row_part.cuh"

namespace automodel::cuda {

// Sums of kElements columns a thread of a block with kBlockThreads. Element e of level l is at
// (l * kElements + e) * kBlockThreads from the thread's first: neighbours touch neighbouring words.
template <class A, int kElements, int kBlockThreads>
class TreeStack {
 public:
  __device__ __forceinline__ explicit TreeStack(A* memory) : own_(memory + linear_thread()) {}

  // Joins leaf number `index` with the finished subtrees before it. On return `leaf` holds the sum
  // over the largest aligned subtree that ends with this leaf; `keep` says whether a later leaf or
  // total needs it.
  __device__ __forceinline__ void push(A (&leaf)[kElements], int64_t index, bool keep) {
    const int depth = numerics::tree_depth(index);
    for (int l = 0; l < depth; ++l) {
#pragma unroll
      for (int e = 0; e < kElements; ++e)
        leaf[e] = numerics::add(level(l)[e * kBlockThreads], leaf[e]);
    }
    if (!keep) return;
#pragma unroll
    for (int e = 0; e < kElements; ++e) level(depth)[e * kBlockThreads] = leaf[e];
  }

  // The sum over `count` leaves that were all kept.
  __device__ __forceinline__ void total(A (&sum)[kElements], int64_t count) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) sum[e] = A(0);
    for (int l = 0; count >> l != 0; ++l) {
      if (!((count >> l) & 1)) continue;
#pragma unroll
      for (int e = 0; e < kElements; ++e)
        sum[e] = numerics::add(level(l)[e * kBlockThreads], sum[e]);
    }
  }

 private:
  __device__ __forceinline__ A* level(int l) const { return own_ + l * kElements * kBlockThreads; }

  A* own_;
};

// Joins the columns of a block's slices of `threads` threads each, a power of two of slices, as an
// aligned tree; slice 0 gets the total. `memory` has room for kElements a thread.
template <int kBlockThreads, class A, int kElements>
__device__ __forceinline__ void join_slices(A (&column)[kElements], A* memory, int threads) {
  A* const own = memory + linear_thread();
  const int slice = linear_thread() / threads;
  for (int step = 1; step * threads < kBlockThreads; step *= 2) {
    if (slice % (2 * step) == step) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) own[e * kBlockThreads] = column[e];
    }
    __syncthreads();
    if (slice % (2 * step) == 0) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        column[e] = numerics::add(column[e], own[e * kBlockThreads + step * threads]);
      }
    }
  }
}

#if defined(AUTOMODEL_HAS_CLUSTERS)
// Joins the columns of slice 0 of a cluster's blocks, a power of two, as an aligned
// tree, through memory as in join_slices. Each block finishes its part of the chunks:
// finish(k, thread, sums) for that thread's chunk number k.
template <int kBlockThreads, class A, int kElements, class Finish>
__device__ __forceinline__ void join_blocks(const A (&column)[kElements], A* memory,
                                            const Finish& finish) {
  const auto cluster = cooperative_groups::this_cluster();
  const int blocks = cluster.num_blocks();
  if (threadIdx.y == 0) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) memory[e * kBlockThreads + threadIdx.x] = column[e];
  }
  cluster.sync();
  const int threads = blockDim.x;
  const int part = kElements / kSlots * threads / blocks;
  for (int i = linear_thread(); i < part; i += kBlockThreads) {
    const int chunk = cluster.block_rank() * part + i;
    const int k = chunk / threads;
    const int thread = chunk % threads;
    A sums[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      A* const word = memory + (k * kSlots + slot) * kBlockThreads + thread;
      A value[kMaxCluster];
#pragma unroll
      for (int b = 0; b < kMaxCluster; ++b) {
        value[b] = b < blocks ? *cluster.map_shared_rank(word, b) : A(0);
      }
#pragma unroll
      for (int step = 1; step < kMaxCluster; step *= 2) {
#pragma unroll
        for (int b = 0; b < kMaxCluster; b += 2 * step) {
          value[b] = numerics::add(value[b], value[b + step]);
        }
      }
      sums[slot] = value[0];
    }
    finish(k, thread, sums);
  }
  cluster.sync();  // no block may end while another reads its memory
}
#endif

}  // namespace automodel::cuda
