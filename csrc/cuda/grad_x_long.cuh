// grad_x of rows of any length, alignment and type: a block reads a row twice, the second time from
// the L2 cache.
#pragma once

#include "cuda/alignment.h"
#include "cuda/launch.h"
#include "cuda/row_sum.cuh"

namespace automodel::cuda {

using numerics::BackwardParams;

struct BackwardAlignment {
  bool x;
  bool grad_y;
  bool grad_sum;
  bool weight;
  bool grad_x;
};

// --- Kernel ---

template <class X, class W>
__device__ __forceinline__ void grad_x_long_row(const BackwardParams& params,
                                                const BackwardAlignment& aligned, int64_t row) {
  using A = numerics::Accumulate<X>;
  const int64_t hidden = params.hidden;
  const A offset = gain_offset<A>(params.zero_centered_gamma);
  const X* const x_row = row_of<X>(params.x, params.x_layout, row);
  const X* const grad_y_row = row_of<X>(params.grad_y, params.grad_y_layout, row);
  const A rstd = static_cast<const A*>(params.rstd)[row];
  // body(slot, t, xhat) for the elements of a chunk.
  const auto for_each_slot = [&](int64_t chunk, const auto& body) {
    const Chunk<X> x = load_chunk(x_row, chunk, hidden, aligned.x);
    const Chunk<X> grad_y = load_chunk(grad_y_row, chunk, hidden, aligned.grad_y);
    const Chunk<W> weight = load_weight<W>(params.weight, chunk, hidden, aligned.weight);
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const A g = numerics::to_accumulate<A>(grad_y.get(slot));
      const A t = apply_gain(g, weight, slot, offset);
      body(slot, t, numerics::mul(numerics::to_accumulate<A>(x.get(slot)), rstd));
    }
  };
  const A sum = long_row_sum<A>(hidden, [&](A(&slots)[kSlots], int64_t chunk) {
    for_each_slot(chunk, [&](int slot, A t, A xhat) {
      const bool inside = chunk * kSlots + slot < hidden;
      slots[slot] = numerics::fma(t, inside ? xhat : A(0), slots[slot]);
    });
  });
  const A mean = numerics::mean_of(sum, hidden);
  X* const grad_x_row = static_cast<X*>(params.grad_x) + row * hidden;
  const X* const grad_sum_row = params.grad_sum == nullptr
                                    ? nullptr
                                    : row_of<X>(params.grad_sum, params.grad_sum_layout, row);
  const int64_t chunks = numerics::chunks_in_row(hidden);
  for (int64_t chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
    A grad_x[kSlots];
    for_each_slot(chunk, [&](int slot, A t, A xhat) {
      grad_x[slot] = numerics::mul(rstd, numerics::fma(-xhat, mean, t));
    });
    if (grad_sum_row != nullptr)
      add_chunk(grad_x, load_chunk(grad_sum_row, chunk, hidden, aligned.grad_sum));
    store_chunk(grad_x_row, round_chunk<X>(grad_x), chunk, hidden, aligned.grad_x);
  }
}

template <class X, class W>
__global__ void __launch_bounds__(kMaxBlockThreads)
    grad_x_long_kernel(const BackwardParams params, const BackwardAlignment aligned) {
  for (int64_t row = blockIdx.x; row < params.rows; row += gridDim.x) {
    grad_x_long_row<X, W>(params, aligned, row);
    __syncthreads();
  }
}

// --- Launch ---

template <class X, class W>
cudaError_t launch_grad_x_long(const BackwardParams& params, cudaStream_t stream) {
  const BackwardAlignment aligned{
      is_aligned(params.x, params.x_layout, params.x_dtype),
      is_aligned(params.grad_y, params.grad_y_layout, params.x_dtype),
      is_aligned(params.grad_sum, params.grad_sum_layout, params.x_dtype),
      is_aligned(params.weight), is_aligned(params.grad_x, params.hidden, params.x_dtype)};
  const int threads = long_row_threads(params.hidden);
  grad_x_long_kernel<X, W><<<long_row_blocks(params.rows), threads, 0, stream>>>(params, aligned);
  return cudaGetLastError();
}

}  // namespace automodel::cuda
