// A thread's part of a row, and the launch of blocks that hold rows so.
#pragma once

#include "cuda/chunk.cuh"
#include "cuda/launch_config.cuh"
#include "cuda/row_kind.h"
#include "numerics/spec.h"

namespace automodel::cuda {

// This thread's part of a row of X: kChunks chunks' worth of elements, which kernels hold as
// Chunk<X>. Memory moves in pieces of 16 bytes. Where a chunk is one piece, the thread has the
// chunks of its virtual threads. Where it is two, a lane and its neighbour share the chunks of
// theirs, a half each, so that the lanes of an instruction touch whole lines: a sector that is torn
// apart on its way halves the rate. join_slots puts the halves' sums together.
template <class X, class Kind>
struct RowPart {
  static constexpr int kChunks = Kind::kChunks;
  static constexpr int kBlockThreads = Kind::kBlockThreads;
  static constexpr int kPieces = sizeof(X) * kSlots / sizeof(uint4);  // of a chunk
  static constexpr int kPieceSlots = kSlots / kPieces;

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

  // The part of another thread of this block's rows.
  __device__ __forceinline__ RowPart of_thread(int thread) const {
    RowPart other = *this;
    other.index += thread - static_cast<int>(threadIdx.x);
    return other;
  }

  // Of each virtual thread's chunks the last may be missing, in whole or a piece.
  __device__ __forceinline__ bool has(int k, int piece = 0) const {
    return k < Kind::kChunks - Kind::kVirtual || chunk(k, piece) < chunks;
  }

  // Calls body(slot) for the elements of the thread's chunk number k that are in the row.
  template <class Body>
  __device__ __forceinline__ void for_each_slot(int k, const Body& body) const {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      if (!has(k, p)) break;
#pragma unroll
      for (int slot = p * kPieceSlots; slot < (p + 1) * kPieceSlots; ++slot) body(slot);
    }
  }

  // This part of a row of T, which may be another type: x, a weight, sums.
  template <class T>
  __device__ __forceinline__ void load(Chunk<T>& to, const T* row, int k) const {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      if (has(k, p)) to.template load_words<kPieces>(p, row + offset(k, p));
    }
  }
  template <class W>
  __device__ __forceinline__ Chunk<W> load_weight(const void* weight, int k) const {
    Chunk<W> chunk;
    if constexpr (!std::is_same_v<W, NoWeight>) load(chunk, static_cast<const W*>(weight), k);
    return chunk;
  }
  template <class T>
  __device__ __forceinline__ void store(T* row, int k, const Chunk<T>& from) const {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      if (has(k, p)) from.template store_words<kPieces>(p, row + offset(k, p));
    }
  }

  // Where piece p of the thread's chunk number k begins, in elements.
  __device__ __forceinline__ int offset(int k, int p) const {
    return chunk(k, p) * kSlots + (kPieces == 1 ? 0 : index % kPieces * kPieceSlots);
  }

 private:
  __device__ __forceinline__ int chunk(int k, int p) const {
    if constexpr (kPieces == 1) return k * threads + index;
    const int lanes = min(threads, kWarp);
    const int lane = index % lanes;
    return k * threads + index - lane + lane / kPieces + p * (lanes / kPieces);
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
