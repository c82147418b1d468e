// How rows are cut among threads, for the kernels that hold a row in registers or shared memory.
// They take rows of whole chunks that begin at multiples of 16 bytes.
#pragma once

#include "cuda/chunk.cuh"
#include "cuda/launch.h"
#include "cuda/launch_config.cuh"
#include "numerics/params.h"
#include "numerics/spec.h"

namespace automodel::cuda {

constexpr int kSmallBlock = 256;  // threads; as many short rows side by side as fill it
constexpr int kLargeBlock = 512;
constexpr int kMaxCluster = 8;  // what a GPU with clusters can launch, if it is not cut smaller

// What a kernel is compiled for. Thread i of P along a row takes chunks i, i + P, i + 2P ...; with
// kVirtual = T / P, chunk number k of a thread belongs to its virtual thread k mod kVirtual.
template <int kChunks_, int kVirtual_, int kBlockThreads_, bool kSpread_>
struct RowKind {
  static constexpr int kChunks = kChunks_;
  static constexpr int kVirtual = kVirtual_;
  static constexpr int kBlockThreads = kBlockThreads_;
  static constexpr bool kSpread = kSpread_;  // over the blocks of a cluster
};

struct RowShape {
  int threads;  // of a block along a row
  int rows;     // side by side in a block
  int blocks;   // that share a row
};

// Calls f(RowKind, RowShape); false where no kind fits.
template <class F>
bool visit_row_kind(int64_t hidden, const DeviceLimits& limits, F f) {
  const int threads = numerics::virtual_threads(hidden);
  const auto chunks = (numerics::chunks_in_row(hidden) + threads - 1) / threads;
  if (chunks > 4) return false;
  if (threads < kLargeBlock) {
    const RowShape shape{threads, kSmallBlock / threads, 1};
    if (chunks == 1) f(RowKind<1, 1, kSmallBlock, false>{}, shape);
    if (chunks == 2) f(RowKind<2, 1, kSmallBlock, false>{}, shape);
    if (chunks == 3) f(RowKind<3, 1, kSmallBlock, false>{}, shape);
    if (chunks == 4) f(RowKind<4, 1, kSmallBlock, false>{}, shape);
    return true;
  }
  const int blocks = threads / kLargeBlock;
  if (blocks > kMaxCluster || (blocks > 1 && !limits.clusters)) return false;
  const RowShape large{kLargeBlock, 1, blocks};
  const RowShape small{kSmallBlock, 1, blocks};
  if (blocks == 1) {
    if (chunks == 2) f(RowKind<4, 2, kSmallBlock, false>{}, small);
    if (chunks == 3) f(RowKind<3, 1, kLargeBlock, false>{}, large);
    if (chunks == 4) f(RowKind<4, 1, kLargeBlock, false>{}, large);
  } else {
    if (chunks == 2) f(RowKind<4, 2, kSmallBlock, true>{}, small);
    if (chunks == 3) f(RowKind<3, 1, kLargeBlock, true>{}, large);
    if (chunks == 4) f(RowKind<4, 1, kLargeBlock, true>{}, large);
  }
  return true;
}

// This thread's part of a row.
template <class Kind>
struct RowPart {
  int index;    // along the row
  int threads;  // P
  int blocks;   // of a cluster that share the row
  int chunks;   // in the row

  __device__ __forceinline__ explicit RowPart(int64_t hidden)
      : index(threadIdx.x),
        threads(blockDim.x),
        blocks(1),
        chunks(static_cast<int>(hidden) / kSlots) {
#if defined(AUTOMODEL_HAS_CLUSTERS)
    if constexpr (Kind::kSpread) {
      const auto cluster = cooperative_groups::this_cluster();
      blocks = cluster.num_blocks();
      index += cluster.block_rank() * blockDim.x;
      threads *= blocks;
    }
#endif
  }

  __device__ __forceinline__ int chunk(int k) const { return k * threads + index; }
  // Only a thread's last chunk may be none.
  __device__ __forceinline__ bool has(int k) const {
    return k + 1 < Kind::kChunks || chunk(k) < chunks;
  }
};

__device__ __forceinline__ int linear_thread() { return threadIdx.y * blockDim.x + threadIdx.x; }

// For `count` clusters of `cluster` blocks.
inline LaunchConfig rows_config(int64_t count, int cluster, const RowShape& shape, size_t shared,
                                cudaStream_t stream) {
  LaunchConfig config(dim3(static_cast<unsigned>(count * cluster)), dim3(shape.threads, shape.rows),
                      shared, stream);
  config.set_cluster(cluster);
  return config;
}

}  // namespace automodel::cuda
