// Rows on their way into a block. Each thread copies its part of a row into shared memory ahead of
// time (cp.async), so rows in flight cost no registers and no barrier.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "cuda/row_part.cuh"

namespace automodel::cuda {

// kStages times kInputs rows.
template <class X, class Kind, int kInputs, int kStages>
class RowStages {
 public:
  using Part = RowPart<X, Kind>;
  static constexpr int kPlane = Kind::kBlockThreads;
  static constexpr int kStage = kInputs * Kind::kChunks * Part::kPieces * kPlane;
  static constexpr int kBytes = kStages * kStage * static_cast<int>(sizeof(uint4));

  __device__ __forceinline__ RowStages(uint4* memory, const Part& part)
      : own_(memory + linear_thread()), part_(part) {}

  // Starts copying this thread's part of a row. The rows of a stage are followed by one commit().
  __device__ __forceinline__ void start(int stage, int input, const X* row) {
#pragma unroll
    for (int k = 0; k < Kind::kChunks; ++k) {
#pragma unroll
      for (int p = 0; p < Part::kPieces; ++p) {
        if (!part_.has(k, p)) break;
        __pipeline_memcpy_async(piece(stage, input, k, p), row + part_.offset(k, p), sizeof(uint4));
      }
    }
  }

  __device__ __forceinline__ void commit() { __pipeline_commit(); }

  // The oldest stage is here.
  __device__ __forceinline__ void wait() {
    __pipeline_wait_prior(kStages - 1);
    asm volatile("" ::: "memory");  // no read may move above the wait
  }

  __device__ __forceinline__ Chunk<X> read(int stage, int input, int k) const {
    Chunk<X> chunk;
#pragma unroll
    for (int p = 0; p < Part::kPieces; ++p) chunk.set_piece(p, *piece(stage, input, k, p));
    return chunk;
  }

 private:
  __device__ __forceinline__ uint4* piece(int stage, int input, int k, int p) const {
    return own_ + stage * kStage + ((input * Kind::kChunks + k) * Part::kPieces + p) * kPlane;
  }

  uint4* own_;
  Part part_;
};

}  // namespace automodel::cuda
