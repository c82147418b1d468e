// Rows on their way into a block. Each thread copies the chunks that it will work on into shared
// memory ahead of time (cp.async), so rows in flight cost no registers and no barrier.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "cuda/row_kind.cuh"
#include "cuda/row_sum.cuh"

namespace automodel::cuda {

// kStages times kInputs rows. Memory moves in pieces of 16 bytes. Where a chunk is two pieces, the
// lanes of a row copy their chunks together, each instruction whole lines; shared memory keeps the
// order of global memory, because a sector that is torn apart on its way halves the rate, but the
// two pieces of every other four chunks are exchanged, or a warp that reads every second piece
// would meet itself in the banks.
template <class X, class Kind, int kInputs, int kStages>
class RowStages {
 public:
  static constexpr int kPieces = sizeof(X) * kSlots / sizeof(uint4);
  static constexpr int kPlane = Kind::kBlockThreads;
  static constexpr int kStage = kInputs * Kind::kChunks * kPieces * kPlane;
  static constexpr int kBytes = kStages * kStage * static_cast<int>(sizeof(uint4));

  __device__ __forceinline__ RowStages(uint4* memory, const RowPart<Kind>& part)
      : memory_(memory), part_(part) {
    const int lanes = min(part.threads, kWarp);
    const int lane = threadIdx.x % lanes;
    step_ = lanes / kPieces;
    shift_ = lane / kPieces - lane;
    piece_ = lane % kPieces;
  }

  // Starts copying this thread's share of a row. The rows of a stage are followed by one commit().
  __device__ __forceinline__ void start(int stage, int input, const X* row) {
    const uint4* const from = reinterpret_cast<const uint4*>(row) + piece_;
#pragma unroll
    for (int k = 0; k < Kind::kChunks; ++k) {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const int other = shift_ + p * step_;  // from this thread to the one whose chunk it copies
        const int chunk = part_.chunk(k) + other;
        if (k + 1 == Kind::kChunks && chunk >= part_.chunks) break;
        __pipeline_memcpy_async(slot(stage, input, k, linear_thread() + other, piece_),
                                from + chunk * kPieces, sizeof(uint4));
      }
    }
  }

  __device__ __forceinline__ void commit() { __pipeline_commit(); }

  // The oldest stage is here.
  __device__ __forceinline__ void wait() {
    __pipeline_wait_prior(kStages - 1);
    asm volatile("" ::: "memory");  // no read may move above the wait
    meet();
  }

  // To be called between the last read of a stage and the next start.
  __device__ __forceinline__ void release() { meet(); }

  __device__ __forceinline__ Chunk<X> read(int stage, int input, int k) const {
    Chunk<X> chunk;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      chunk.set_piece(p, *slot(stage, input, k, linear_thread(), p));
    }
    return chunk;
  }

 private:
  __device__ __forceinline__ uint4* slot(int stage, int input, int k, int thread, int piece) const {
    const int place = kPieces == 1 ? thread : 2 * thread + (piece ^ (thread >> 2 & 1));
    return memory_ + stage * kStage + (input * Kind::kChunks + k) * kPieces * kPlane + place;
  }
  static __device__ __forceinline__ void meet() {
    if constexpr (kPieces > 1) __syncwarp();
  }

  uint4* memory_;
  RowPart<Kind> part_;
  int step_;
  int shift_;
  int piece_;
};

}  // namespace automodel::cuda
