// grad_x, and grad_weight's partial sums with it. Three ways, all with the same bits:
//
// fused: a row is held in registers by T threads; a block takes a unit of rows and keeps the
// columns' sums beside it, so x and grad_y are read once.
//
// long: rows that do not fit, and float64. grad_x by reading a row twice, grad_weight by columns.
//
// columns (columns.cu): grad_weight alone.
#pragma once

#include "cuda/launch.h"
#include "cuda/row_sum.cuh"
#include "cuda/shared_memory.cuh"
#include "cuda/tree_stack.cuh"
#include "cuda/unit.h"
#include "numerics/dispatch.h"

namespace automodel::cuda {

using numerics::BackwardParams;
using numerics::kLeafRows;

// --- Traits ---

struct BackwardAlignment {
  bool x;
  bool grad_y;
  bool weight;
  bool grad_x;
  bool partials;
};

template <class X, int kChunks, int kBlockThreads>
struct FusedTraits {
  // Blocks that a multiprocessor is to hold, which limits the registers of a thread.
  static constexpr int kBlocks = kBlockThreads <= kFusedSmallBlock ? 2 : 1;
  // Reading the next row early costs as many registers as the row itself.
  static constexpr bool kPrefetch = sizeof(X) == 2 && kChunks == 2;
  static constexpr int kElements = kChunks * kSlots;
};

// --- Kernels ---

template <class X, int kChunks>
struct RowInputs {
  Chunk<X> x[kChunks];
  Chunk<X> grad_y[kChunks];
  numerics::Accumulate<X> rstd;

  __device__ __forceinline__ void load(const BackwardParams& params,
                                       const BackwardAlignment& aligned, int64_t row) {
    const X* const x_row =
        static_cast<const X*>(params.x) + numerics::row_offset(params.x_layout, row);
    const X* const grad_y_row =
        static_cast<const X*>(params.grad_y) + numerics::row_offset(params.grad_y_layout, row);
    const int hidden = static_cast<int>(params.hidden);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int chunk = k * blockDim.x + threadIdx.x;
      if (chunk * kSlots >= hidden) break;
      x[k] = load_chunk(x_row, chunk, hidden, aligned.x);
      grad_y[k] = load_chunk(grad_y_row, chunk, hidden, aligned.grad_y);
    }
    rstd = static_cast<const numerics::Accumulate<X>*>(params.rstd)[row];
  }

  __device__ __forceinline__ void stay_packed() {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      x[k].stay_packed();
      grad_y[k].stay_packed();
    }
  }
};

// A block of (T, slices) threads takes a unit; slice s its s-th aligned subtree of leaves.
template <class X, class W, int kChunks, int kBlockThreads, bool kWantWeight>
__global__ void __launch_bounds__(kBlockThreads, FusedTraits<X, kChunks, kBlockThreads>::kBlocks)
    backward_kernel(const BackwardParams params, const BackwardAlignment aligned) {
  using A = numerics::Accumulate<X>;
  using Traits = FusedTraits<X, kChunks, kBlockThreads>;
  __shared__ A sums[2][kBlockThreads / kWarp];
  const int threads = blockDim.x;
  const int slices = blockDim.y;
  const int hidden = static_cast<int>(params.hidden);
  const int64_t unit = blockIdx.x;
  const int slice_leaves = static_cast<int>(params.unit_leaves / slices);
  const int slice_rows = slice_leaves * kLeafRows;
  const int64_t unit_row = unit * slice_rows * slices;
  const int64_t first = unit_row + int64_t{slice_rows} * threadIdx.y;
  const auto rows_left = [&](int64_t from) {
    return static_cast<int>(max(int64_t{0}, min(int64_t{slice_rows}, params.rows - from)));
  };
  const int own_rows = rows_left(first);
  const int block_rows = rows_left(unit_row);  // the first slice has the most

  Chunk<W> weight[kChunks];
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const int chunk = k * threads + threadIdx.x;
    if (chunk * kSlots < hidden) {
      weight[k] = load_weight<W>(params.weight, chunk, hidden, aligned.weight);
    }
  }

  TreeStack<A, Traits::kElements> stack{dynamic_shared<A>() + threadIdx.y * threads + threadIdx.x,
                                        threads * slices};
  A column[Traits::kElements] = {};

  RowInputs<X, kChunks> row;
  if (own_rows > 0) row.load(params, aligned, first);
#pragma unroll 1
  for (int i = 0; i < block_rows; ++i) {
    const bool active = i < own_rows;
    RowInputs<X, kChunks> next;
    if (Traits::kPrefetch && i + 1 < own_rows) next.load(params, aligned, first + i + 1);

    A slots[kSlots] = {};
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int begin = (k * threads + threadIdx.x) * kSlots;
      if (!active || begin >= hidden) break;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const A g = numerics::to_accumulate<A>(row.grad_y[k].get(slot));
        const A t = apply_gain(g, weight[k], slot, params.zero_centered_gamma);
        const A x = numerics::to_accumulate<A>(row.x[k].get(slot));
        const A xhat = numerics::mul(x, row.rstd);
        // 0 * rstd is not 0 where rstd is infinite.
        slots[slot] = numerics::fma(t, begin + slot < hidden ? xhat : A(0), slots[slot]);
      }
    }
    const A sum = join_row(join_slots(slots), sums[i % 2]);
    row.stay_packed();
#pragma unroll
    for (int k = 0; k < kChunks; ++k) weight[k].stay_packed();
    const A mean = numerics::mean_of(sum, hidden);

    if (active) {
      X* const grad_x_row = static_cast<X*>(params.grad_x) + (first + i) * hidden;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int chunk = k * threads + threadIdx.x;
        if (chunk * kSlots >= hidden) break;
        Chunk<X> grad_x;
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
          const A g = numerics::to_accumulate<A>(row.grad_y[k].get(slot));
          const A t = apply_gain(g, weight[k], slot, params.zero_centered_gamma);
          const A x = numerics::to_accumulate<A>(row.x[k].get(slot));
          const A xhat = numerics::mul(x, row.rstd);
          grad_x.set(slot,
                     numerics::round_to<X>(numerics::mul(row.rstd, numerics::fma(-xhat, mean, t))));
          if constexpr (kWantWeight) {
            A& acc = column[k * kSlots + slot];
            acc = numerics::fma(g, xhat, acc);
          }
        }
        store_chunk(grad_x_row, grad_x, chunk, hidden, aligned.grad_x);
      }
      if constexpr (kWantWeight) {
        if ((i + 1) % kLeafRows == 0 || i + 1 == own_rows) {
          const int leaf = i / kLeafRows;
          const bool complete = leaf + 1 == slice_leaves;
          stack.push(column, leaf, !complete);
          if (!complete) {
            if (i + 1 == own_rows) {
              stack.total(column, leaf + 1);
            } else {
#pragma unroll
              for (int e = 0; e < Traits::kElements; ++e) column[e] = A(0);
            }
          }
        }
      }
    }
    if (Traits::kPrefetch) {
      row = next;
    } else if (i + 1 < own_rows) {
      row.load(params, aligned, first + i + 1);
    }
  }

  if constexpr (kWantWeight) {
    join_slices(column, stack);
    if (threadIdx.y != 0) return;
    A* const partial = static_cast<A*>(params.partials) + unit * hidden;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      Chunk<A> value;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) value.set(slot, column[k * kSlots + slot]);
      store_chunk(partial, value, k * threads + threadIdx.x, hidden, aligned.partials);
    }
  }
}

template <class X, class W>
__device__ __forceinline__ void grad_x_long_row(const BackwardParams& params,
                                                const BackwardAlignment& aligned, int64_t row) {
  using A = numerics::Accumulate<X>;
  const int64_t hidden = params.hidden;
  const X* const x_row =
      static_cast<const X*>(params.x) + numerics::row_offset(params.x_layout, row);
  const X* const grad_y_row =
      static_cast<const X*>(params.grad_y) + numerics::row_offset(params.grad_y_layout, row);
  const A rstd = static_cast<const A*>(params.rstd)[row];
  // body(slot, t, xhat) for the elements of a chunk.
  const auto for_each_slot = [&](int64_t chunk, const auto& body) {
    const Chunk<X> x = load_chunk(x_row, chunk, hidden, aligned.x);
    const Chunk<X> grad_y = load_chunk(grad_y_row, chunk, hidden, aligned.grad_y);
    const Chunk<W> weight = load_weight<W>(params.weight, chunk, hidden, aligned.weight);
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const A g = numerics::to_accumulate<A>(grad_y.get(slot));
      const A t = apply_gain(g, weight, slot, params.zero_centered_gamma);
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
  const int64_t chunks = numerics::chunks_in_row(hidden);
  for (int64_t chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
    Chunk<X> grad_x;
    for_each_slot(chunk, [&](int slot, A t, A xhat) {
      grad_x.set(slot, numerics::round_to<X>(numerics::mul(rstd, numerics::fma(-xhat, mean, t))));
    });
    store_chunk(grad_x_row, grad_x, chunk, hidden, aligned.grad_x);
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

template <class X, class W, int kChunks, int kBlockThreads, bool kWantWeight>
cudaError_t launch_fused(const BackwardParams& params, const BackwardAlignment& aligned,
                         cudaStream_t stream) {
  using A = numerics::Accumulate<X>;
  const dim3 block(fused_threads(params.hidden), fused_slices(params.hidden));
  const size_t shared =
      kWantWeight ? fused_stack_elements(params.hidden, kChunks, params.unit_leaves) * sizeof(A)
                  : 0;
  const auto kernel = backward_kernel<X, W, kChunks, kBlockThreads, kWantWeight>;
  const cudaError_t error = allow_dynamic_shared(kernel, shared);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(params.units), block, shared, stream>>>(params, aligned);
  return cudaGetLastError();
}

template <class X, class W, int kBlockThreads, bool kWantWeight>
cudaError_t launch_fused_rows(const BackwardParams& params, const BackwardAlignment& aligned,
                              cudaStream_t stream) {
  switch (fused_chunks(params.hidden)) {
    case 2:
      return launch_fused<X, W, 2, kBlockThreads, kWantWeight>(params, aligned, stream);
    case 3:
      return launch_fused<X, W, 3, kBlockThreads, kWantWeight>(params, aligned, stream);
    default:
      return launch_fused<X, W, 4, kBlockThreads, kWantWeight>(params, aligned, stream);
  }
}

template <class X, class W>
cudaError_t launch_grad_x_long(const BackwardParams& params, const BackwardAlignment& aligned,
                               cudaStream_t stream) {
  const int threads = long_row_threads(params.hidden);
  grad_x_long_kernel<X, W><<<long_row_blocks(params.rows), threads, 0, stream>>>(params, aligned);
  return cudaGetLastError();
}

template <class X>
cudaError_t launch_backward_rows_as(const BackwardParams& params, cudaStream_t stream) {
  return numerics::visit_weight<X>(params.weight_dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    using A = numerics::Accumulate<X>;
    const BackwardAlignment aligned{chunks_are_aligned<X>(params.x, params.x_layout),
                                    chunks_are_aligned<X>(params.grad_y, params.grad_y_layout),
                                    chunks_are_aligned<W>(params.weight, 0),
                                    chunks_are_aligned<X>(params.grad_x, params.hidden),
                                    chunks_are_aligned<A>(params.partials, params.hidden)};
    if constexpr (sizeof(X) <= 4) {
      if (backward_is_fused(params)) {
        const bool small = fused_threads(params.hidden) <= kFusedSmallBlock;
        if constexpr (!std::is_same_v<W, NoWeight>) {
          if (params.grad_weight != nullptr) {
            return small ? launch_fused_rows<X, W, kFusedSmallBlock, true>(params, aligned, stream)
                         : launch_fused_rows<X, W, kFusedLargeBlock, true>(params, aligned, stream);
          }
        }
        return small ? launch_fused_rows<X, W, kFusedSmallBlock, false>(params, aligned, stream)
                     : launch_fused_rows<X, W, kFusedLargeBlock, false>(params, aligned, stream);
      }
    }
    return launch_grad_x_long<X, W>(params, aligned, stream);
  });
}

}  // namespace automodel::cuda
