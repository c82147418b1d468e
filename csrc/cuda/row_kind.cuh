// How rows are cut among threads, for the kernels that hold a row in registers or shared memory.
// They take rows of whole chunks that begin at multiples of 16 bytes.
#pragma once

#include "cuda/chunk.cuh"
#include "cuda/launch.h"
#include "cuda/launch_config.cuh"
#include "numerics/params.h"
#include "numerics/spec.h"

namespace automodel::cuda {

constexpr int kWarp = 32;
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

// The whole chunks of a virtual thread, 1 to 4; more only where there are no more virtual threads.
inline int64_t chunks_of_virtual_thread(int64_t hidden) {
  const int threads = numerics::virtual_threads(hidden);
  return (numerics::chunks_in_row(hidden) + threads - 1) / threads;
}

// Calls f(RowKind, RowShape) for rows of fewer virtual threads than kLargeBlock: as many of them
// side by side as fill a block. False for longer ones.
template <class F>
bool visit_short_kind(int64_t hidden, F f) {
  const int threads = numerics::virtual_threads(hidden);
  if (threads >= kLargeBlock) return false;
  const RowShape shape{threads, kSmallBlock / threads, 1};
  const auto chunks = chunks_of_virtual_thread(hidden);
  if (chunks == 1) f(RowKind<1, 1, kSmallBlock, false>{}, shape);
  if (chunks == 2) f(RowKind<2, 1, kSmallBlock, false>{}, shape);
  if (chunks == 3) f(RowKind<3, 1, kSmallBlock, false>{}, shape);
  if (chunks == 4) f(RowKind<4, 1, kSmallBlock, false>{}, shape);
  return true;
}

// The same for longer rows, by blocks of kBlock threads. Rather than more blocks for a row a thread
// gets several virtual threads, as long as that is at most kMostChunks chunks; so where there are
// more blocks, twice as many virtual threads would be more chunks than that. False where that takes
// too many blocks.
template <int kBlock, int kMostChunks, class F>
bool visit_long_kind(int64_t hidden, const DeviceLimits& limits, F f) {
  const int threads = numerics::virtual_threads(hidden);
  const auto chunks = chunks_of_virtual_thread(hidden);
  int together = 1;
  while (threads > kBlock * together && 2 * together * chunks <= kMostChunks) together *= 2;
  const RowShape shape{kBlock, 1, threads / (kBlock * together)};
  if (chunks > 4 || shape.blocks > (limits.clusters ? kMaxCluster : 1)) return false;
  const auto visit = [&](auto kind_chunks, auto kind_together) {
    constexpr int kChunks = decltype(kind_chunks)::value;
    constexpr int kVirtual = decltype(kind_together)::value;
    if (chunks != kChunks || together != kVirtual) return;
    if constexpr (kVirtual == 1 || kVirtual * kChunks <= kMostChunks) {
      using Whole = RowKind<kVirtual * kChunks, kVirtual, kBlock, false>;
      if (shape.blocks == 1) f(Whole{}, shape);
    }
    if constexpr (2 * kVirtual * kChunks > kMostChunks &&
                  (kVirtual == 1 || kVirtual * kChunks <= kMostChunks)) {
      using Spread = RowKind<kVirtual * kChunks, kVirtual, kBlock, true>;
      if (shape.blocks > 1) f(Spread{}, shape);
    }
  };
  const auto visit_chunks = [&](auto kind_together) {
    visit(std::integral_constant<int, 2>{}, kind_together);
    visit(std::integral_constant<int, 3>{}, kind_together);
    visit(std::integral_constant<int, 4>{}, kind_together);
  };
  visit_chunks(std::integral_constant<int, 1>{});
  visit_chunks(std::integral_constant<int, 2>{});
  visit_chunks(std::integral_constant<int, 4>{});
  return true;
}

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
