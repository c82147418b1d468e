// The backward pass for rows of any length, alignment and type, and for few rows. Some blocks take
// rows of grad_x, which they read twice, the second time from the L2 cache; the others take columns
// of a unit's grad_weight: a thread goes down the rows of a slice with a chunk of columns. Where
// one unit is all, they write grad_weight itself.
#pragma once

#include "cuda/alignment.h"
#include "cuda/backward_plan.h"
#include "cuda/gains.cuh"
#include "cuda/launch_config.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/tree_stack.cuh"

namespace automodel::cuda {

using numerics::BackwardParams;
using numerics::kLeafRows;

struct BackwardAlignment {
  bool x;
  bool grad_y;
  bool grad_sum;
  bool weight;
  bool grad_x;
  bool partials;
  bool grad_weight;
};

// --- Kernel ---

// A row beyond the last one is the last, for the barriers, and is not stored.
template <class X, class W>
__device__ __forceinline__ void grad_x_long_row(const BackwardParams& params,
                                                const BackwardAlignment& aligned, int64_t row,
                                                bool beyond) {
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
    const ChunkGains<A, W> gains(weight, offset);
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const A t = gains.apply(numerics::to_accumulate<A>(grad_y.get(slot)), slot);
      body(slot, t, numerics::mul(numerics::to_accumulate<A>(x.get(slot)), rstd));
    }
  };
  const A sum = long_row_sum<A>(hidden, [&](A(&slots)[kSlots], int64_t chunk) {
    for_each_slot(chunk, [&](int slot, A t, A xhat) {
      const bool inside = chunk * kSlots + slot < hidden;
      slots[slot] = numerics::fma(t, inside ? xhat : A(0), slots[slot]);
    });
  });
  if (beyond) return;
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

// column_sum's last step and grad_weight's rounding.
template <class W, class A>
__device__ __forceinline__ Chunk<W> finish_columns(const A (&sums)[kSlots]) {
  A finished[kSlots];
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) finished[slot] = numerics::finish_sum(sums[slot]);
  return round_chunk<W>(finished);
}

template <class X, class W>
__device__ __forceinline__ void grad_weight_long_columns(const BackwardParams& params,
                                                         const BackwardAlignment& aligned,
                                                         int64_t unit, int64_t first_chunk) {
  using A = numerics::Accumulate<X>;
  const int64_t hidden = params.hidden;
  const int64_t chunk = first_chunk + linear_thread() % kLongColumns;
  const int slice_leaves = static_cast<int>(params.units.leaves) / kLongSlices;
  const int64_t slice = unit * kLongSlices + linear_thread() / kLongColumns;
  const int64_t first = slice * slice_leaves * kLeafRows;
  const int64_t last = min(first + slice_leaves * kLeafRows, params.rows);
  A* const meeting = dynamic_shared<A>();
  TreeStack<A, kSlots, kLongThreads> stack(meeting + kSlots * kLongThreads);

  constexpr int kBatch = 8 / sizeof(X);  // rows that are read at once
  A column[kSlots] = {};
  if (chunk * kSlots < hidden) {
    int leaf = 0;
    for (int64_t begin = first; begin < last; begin += kLeafRows, ++leaf) {
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) column[slot] = A(0);
      const int leaf_rows = static_cast<int>(min(int64_t{kLeafRows}, last - begin));
#pragma unroll 1
      for (int done = 0; done < leaf_rows; done += kBatch) {
        Chunk<X> x[kBatch];
        Chunk<X> grad_y[kBatch];
        A rstd[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (done + i >= leaf_rows) break;
          const int64_t row = begin + done + i;
          x[i] = load_chunk(row_of<X>(params.x, params.x_layout, row), chunk, hidden, aligned.x);
          grad_y[i] = load_chunk(row_of<X>(params.grad_y, params.grad_y_layout, row), chunk, hidden,
                                 aligned.grad_y);
          rstd[i] = static_cast<const A*>(params.rstd)[row];
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (done + i >= leaf_rows) break;
#pragma unroll
          for (int slot = 0; slot < kSlots; ++slot) {
            const A xhat = numerics::mul(numerics::to_accumulate<A>(x[i].get(slot)), rstd[i]);
            column[slot] =
                numerics::fma(numerics::to_accumulate<A>(grad_y[i].get(slot)), xhat, column[slot]);
          }
        }
      }
      stack.push(column, leaf, leaf + 1 != slice_leaves);
    }
    if (leaf != slice_leaves) stack.total(column, leaf);
  }
  if (params.rows > slice_leaves * kLeafRows) {
    join_slices<kLongThreads>(column, meeting, kLongColumns);
  }

  if (linear_thread() >= kLongColumns || chunk * kSlots >= hidden) return;
  if (params.units.count == 1) {
    store_chunk(static_cast<W*>(params.grad_weight), finish_columns<W>(column), chunk, hidden,
                aligned.grad_weight);
  } else {
    store_chunk(static_cast<A*>(params.partials) + unit * hidden, round_chunk<A>(column), chunk,
                hidden, aligned.partials);
  }
}

// The first row_blocks blocks take blockDim.y rows each; then column_blocks a unit its columns.
template <class X, class W>
__global__ void __launch_bounds__(kLongThreads)
    backward_long_kernel(const BackwardParams params, const unsigned row_blocks,
                         const unsigned column_blocks, const BackwardAlignment aligned) {
  if (blockIdx.x < row_blocks) {
    const int64_t step = int64_t{row_blocks} * blockDim.y;
    for (int64_t first = int64_t{blockIdx.x} * blockDim.y; first < params.rows; first += step) {
      const int64_t row = first + threadIdx.y;
      grad_x_long_row<X, W>(params, aligned, min(row, params.rows - 1), row >= params.rows);
      __syncthreads();
    }
    return;
  }
  if constexpr (!std::is_same_v<W, NoWeight>) {
    const unsigned block = blockIdx.x - row_blocks;
    grad_weight_long_columns<X, W>(params, aligned, block / column_blocks,
                                   int64_t{block % column_blocks} * kLongColumns);
  }
}

// --- Launch ---

template <class X, class W>
cudaError_t launch_backward_long(const BackwardParams& params, cudaStream_t stream) {
  using A = numerics::Accumulate<X>;
  const BackwardAlignment aligned{
      is_aligned(params.x, params.x_layout, params.x_dtype),
      is_aligned(params.grad_y, params.grad_y_layout, params.x_dtype),
      is_aligned(params.grad_sum, params.grad_sum_layout, params.x_dtype),
      is_aligned(params.weight),
      is_aligned(params.grad_x, params.hidden, params.x_dtype),
      partials_are_aligned(params),
      is_aligned(params.grad_weight)};
  const int threads = long_row_threads(params.hidden, kLongThreads);
  const int rows = kLongThreads / threads;
  const unsigned row_blocks =
      params.grad_x == nullptr ? 0 : long_row_blocks((params.rows + rows - 1) / rows);
  const int64_t column_blocks = columns_blocks(params.hidden);
  int64_t blocks = row_blocks;
  size_t shared = 0;
  if (params.grad_weight != nullptr) {
    blocks += params.units.count * column_blocks;
    shared = static_cast<size_t>(columns_elements(params.units.leaves)) * sizeof(A);
  }
  return LaunchConfig(dim3(static_cast<unsigned>(blocks)), dim3(threads, rows), shared, stream)
      .launch(backward_long_kernel<X, W>, params, row_blocks, static_cast<unsigned>(column_blocks),
              aligned);
}

}  // namespace automodel::cuda
