// y and rstd. A row of at most kMaxBlockThreads virtual threads, so of at most 4 chunks a thread,
// is held in registers and read once; longer ones (and float64) are read twice by a block, the
// second time from the L2 cache.
#pragma once

#include "cuda/launch.h"
#include "cuda/row_sum.cuh"
#include "numerics/dispatch.h"

namespace automodel::cuda {

using numerics::ForwardParams;

// --- Traits ---

constexpr int kForwardBlockThreads = 256;  // for rows of fewer threads: as many rows as fill it

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || \
                               __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1100)
constexpr int kMultiprocessorThreads = 1536;
#else
constexpr int kMultiprocessorThreads = 2048;
#endif

// Blocks that a multiprocessor is to hold, which limits the registers of a thread: for 2 chunks all
// the threads that it can hold, and the more chunks a thread has in flight the fewer.
template <int kChunks, int kBlockThreads>
struct ForwardTraits {
  static constexpr int kThreads = kChunks <= 2   ? kMultiprocessorThreads
                                  : kChunks == 3 ? 1536
                                                 : 1280;
  static constexpr int kBlocks = kThreads / kBlockThreads;
};

struct ForwardAlignment {
  bool x;
  bool weight;
  bool y;
};

// --- Kernels ---

template <class X, class W, int kChunks, int kBlockThreads>
__global__ void __launch_bounds__(kBlockThreads, ForwardTraits<kChunks, kBlockThreads>::kBlocks)
    forward_kernel(const ForwardParams params, const ForwardAlignment aligned) {
  using A = numerics::Accumulate<X>;
  __shared__ A sums[kMaxBlockThreads / kWarp];
  const int threads = blockDim.x;
  const int hidden = static_cast<int>(params.hidden);
  const int chunks = (hidden + kSlots - 1) / kSlots;
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const bool active = row < params.rows;  // the others take part in the sums alone
  const X* const x_row =
      static_cast<const X*>(params.x) + numerics::row_offset(params.x_layout, active ? row : 0);

  Chunk<X> x[kChunks];
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const int chunk = k * threads + threadIdx.x;
    if (chunk < chunks) x[k] = load_chunk(x_row, chunk, hidden, aligned.x);
  }

  A slots[kSlots] = {};
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (k * threads + threadIdx.x >= chunks) break;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const A value = numerics::to_accumulate<A>(x[k].get(slot));
      slots[slot] = numerics::fma(value, value, slots[slot]);
    }
  }
  const A sum = join_row(join_slots(slots), sums);
#pragma unroll
  for (int k = 0; k < kChunks; ++k) x[k].stay_packed();
  const A rstd = numerics::rstd_of(sum, hidden, static_cast<A>(params.eps));
  if (!active) return;

  if (params.rstd != nullptr && threadIdx.x == 0) static_cast<A*>(params.rstd)[row] = rstd;
  X* const y_row = static_cast<X*>(params.y) + row * hidden;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const int chunk = k * threads + threadIdx.x;
    if (chunk >= chunks) break;
    const Chunk<W> weight = load_weight<W>(params.weight, chunk, hidden, aligned.weight);
    Chunk<X> y;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const A xhat = numerics::mul(numerics::to_accumulate<A>(x[k].get(slot)), rstd);
      y.set(slot,
            numerics::round_to<X>(apply_gain(xhat, weight, slot, params.zero_centered_gamma)));
    }
    store_chunk(y_row, y, chunk, hidden, aligned.y);
  }
}

template <class X, class W>
__device__ __forceinline__ void forward_long_row(const ForwardParams& params,
                                                 const ForwardAlignment& aligned, int64_t row) {
  using A = numerics::Accumulate<X>;
  const int64_t hidden = params.hidden;
  const X* const x_row =
      static_cast<const X*>(params.x) + numerics::row_offset(params.x_layout, row);
  const A sum = long_row_sum<A>(hidden, [&](A(&slots)[kSlots], int64_t chunk) {
    const Chunk<X> x = load_chunk(x_row, chunk, hidden, aligned.x);
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
    const Chunk<X> x = load_chunk(x_row, chunk, hidden, aligned.x);
    const Chunk<W> weight = load_weight<W>(params.weight, chunk, hidden, aligned.weight);
    Chunk<X> y;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const A xhat = numerics::mul(numerics::to_accumulate<A>(x.get(slot)), rstd);
      y.set(slot,
            numerics::round_to<X>(apply_gain(xhat, weight, slot, params.zero_centered_gamma)));
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

template <class X, class W, int kBlockThreads>
cudaError_t launch_forward_rows(const ForwardParams& params, const ForwardAlignment& aligned,
                                cudaStream_t stream) {
  const int threads = numerics::virtual_threads(params.hidden);
  const int rows = threads < kForwardBlockThreads ? kForwardBlockThreads / threads : 1;
  const dim3 block(threads, rows);
  const auto grid = static_cast<unsigned>((params.rows + rows - 1) / rows);
  switch ((numerics::chunks_in_row(params.hidden) + threads - 1) / threads) {
    case 1:
    case 2:
      forward_kernel<X, W, 2, kBlockThreads><<<grid, block, 0, stream>>>(params, aligned);
      break;
    case 3:
      forward_kernel<X, W, 3, kBlockThreads><<<grid, block, 0, stream>>>(params, aligned);
      break;
    default:
      forward_kernel<X, W, 4, kBlockThreads><<<grid, block, 0, stream>>>(params, aligned);
  }
  return cudaGetLastError();
}

template <class X, class W>
cudaError_t launch_forward_long(const ForwardParams& params, const ForwardAlignment& aligned,
                                cudaStream_t stream) {
  const int threads = long_row_threads(params.hidden);
  forward_long_kernel<X, W><<<long_row_blocks(params.rows), threads, 0, stream>>>(params, aligned);
  return cudaGetLastError();
}

template <class X>
cudaError_t launch_forward_as(const ForwardParams& params, cudaStream_t stream) {
  return numerics::visit_weight<X>(params.weight_dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    const ForwardAlignment aligned{chunks_are_aligned<X>(params.x, params.x_layout),
                                   chunks_are_aligned<W>(params.weight, 0),
                                   chunks_are_aligned<X>(params.y, params.hidden)};
    if constexpr (sizeof(X) <= 4) {
      const int threads = numerics::virtual_threads(params.hidden);
      if (threads <= kForwardBlockThreads) {
        return launch_forward_rows<X, W, kForwardBlockThreads>(params, aligned, stream);
      }
      if (threads <= 2 * kForwardBlockThreads) {
        return launch_forward_rows<X, W, 2 * kForwardBlockThreads>(params, aligned, stream);
      }
      if (threads <= kMaxBlockThreads) {
        return launch_forward_rows<X, W, kMaxBlockThreads>(params, aligned, stream);
      }
    }
    return launch_forward_long<X, W>(params, aligned, stream);
  });
}

}  // namespace automodel::cuda
