// y and rstd of rows of any length, alignment and type: a block reads a row twice, the second time
// from the L2 cache.
#pragma once

#include "cuda/alignment.h"
#include "cuda/gains.cuh"
#include "cuda/launch_config.cuh"
#include "cuda/row_sum.cuh"

namespace automodel::cuda {

using numerics::ForwardParams;

struct ForwardAlignment {
  bool x;
  bool residual;
  bool sum;
  bool weight;
  bool y;
};

// --- Kernel ---

template <class X, class W>
__device__ __forceinline__ void forward_long_row(const ForwardParams& params,
                                                 const ForwardAlignment& aligned, int64_t row) {
  using A = numerics::Accumulate<X>;
  const int64_t hidden = params.hidden;
  const A offset = gain_offset<A>(params.zero_centered_gamma);
  const X* const x_row = row_of<X>(params.x, params.x_layout, row);
  const bool add = params.residual != nullptr;
  const X* const residual_row = row_of<X>(params.residual, params.residual_layout, row);
  X* const sum_row = static_cast<X*>(params.sum) + row * hidden;
  const A sum = long_row_sum<A>(hidden, [&](A(&slots)[kSlots], int64_t chunk) {
    Chunk<X> x = load_chunk(x_row, chunk, hidden, aligned.x);
    if (add) {
      x = add_chunks(x, load_chunk(residual_row, chunk, hidden, aligned.residual));
      store_chunk(sum_row, x, chunk, hidden, aligned.sum);
    }
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const A value = numerics::to_accumulate<A>(x.get(slot));
      slots[slot] = numerics::fma(value, value, slots[slot]);
    }
  });
  const A rstd = numerics::rstd_of(sum, hidden, static_cast<A>(params.eps));
  if (params.rstd != nullptr && threadIdx.x == 0) static_cast<A*>(params.rstd)[row] = rstd;
  X* const y_row = static_cast<X*>(params.y) + row * hidden;
  const int64_t chunks = numerics::chunks_in_row(hidden);
  for (int64_t chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
    const Chunk<X> x = add ? load_chunk(sum_row, chunk, hidden, aligned.sum)
                           : load_chunk(x_row, chunk, hidden, aligned.x);
    const Chunk<W> weight = load_weight<W>(params.weight, chunk, hidden, aligned.weight);
    const ChunkGains<A, W> gains(weight, offset);
    Chunk<X> y;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const A xhat = numerics::mul(numerics::to_accumulate<A>(x.get(slot)), rstd);
      y.set(slot, numerics::round_to<X>(gains.apply(xhat, slot)));
    }
    store_chunk(y_row, y, chunk, hidden, aligned.y);
  }
}

template <class X, class W>
__global__ void __launch_bounds__(kMaxBlockThreads)
    forward_long_kernel(const ForwardParams params, const ForwardAlignment aligned) {
  for (int64_t row = blockIdx.x; row < params.rows; row += gridDim.x) {
    forward_long_row<X, W>(params, aligned, row);
    __syncthreads();
  }
}

// --- Launch ---

template <class X, class W>
cudaError_t launch_forward_long(const ForwardParams& params, cudaStream_t stream) {
  const ForwardAlignment aligned{
      is_aligned(params.x, params.x_layout, params.x_dtype),
      is_aligned(params.residual, params.residual_layout, params.x_dtype),
      is_aligned(params.sum, params.hidden, params.x_dtype), is_aligned(params.weight),
      is_aligned(params.y, params.hidden, params.x_dtype)};
  const int threads = long_row_threads(params.hidden, kMaxBlockThreads);
  return LaunchConfig(dim3(long_row_blocks(params.rows)), dim3(threads), 0, stream)
      .launch(forward_long_kernel<X, W>, params, aligned);
}

}  // namespace automodel::cuda
