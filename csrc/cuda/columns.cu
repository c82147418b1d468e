// grad_weight by columns: a thread owns a chunk of columns and goes down a unit's rows. For a
// frozen x, and for rows that the fused kernel does not hold. Then the join of all units' partial
// sums.
#include "cuda/launch.h"
#include "cuda/shared_memory.cuh"
#include "cuda/tree_stack.cuh"
#include "cuda/unit.h"
#include "numerics/dispatch.h"

namespace automodel::cuda {
namespace {

using numerics::BackwardParams;
using numerics::kLeafRows;

// --- Kernels ---

struct ColumnsAlignment {
  bool x;
  bool grad_y;
  bool partials;
};

template <class X>
__global__ void __launch_bounds__(kColumnsThreads)
    columns_kernel(const BackwardParams params, const unsigned column_blocks,
                   const ColumnsAlignment aligned) {
  using A = numerics::Accumulate<X>;
  const int64_t hidden = params.hidden;
  const int64_t unit = blockIdx.x / column_blocks;
  const int64_t chunk = blockIdx.x % column_blocks * int64_t{blockDim.x} + threadIdx.x;
  if (chunk * kSlots >= hidden) return;
  const int64_t first = unit * params.unit_leaves * kLeafRows;
  const int64_t last = min(first + params.unit_leaves * kLeafRows, params.rows);
  TreeStack<A, kSlots> stack{dynamic_shared<A>() + threadIdx.x, static_cast<int>(blockDim.x)};

  A column[kSlots];
  int64_t leaf = 0;
  for (int64_t begin = first; begin < last; begin += kLeafRows, ++leaf) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) column[slot] = A(0);
    const int leaf_rows = static_cast<int>(min(int64_t{kLeafRows}, last - begin));
#pragma unroll 2
    for (int i = 0; i < leaf_rows; ++i) {
      const int64_t row = begin + i;
      const Chunk<X> x =
          load_chunk(static_cast<const X*>(params.x) + numerics::row_offset(params.x_layout, row),
                     chunk, hidden, aligned.x);
      const Chunk<X> grad_y = load_chunk(
          static_cast<const X*>(params.grad_y) + numerics::row_offset(params.grad_y_layout, row),
          chunk, hidden, aligned.grad_y);
      const A rstd = static_cast<const A*>(params.rstd)[row];
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const A xhat = numerics::mul(numerics::to_accumulate<A>(x.get(slot)), rstd);
        column[slot] =
            numerics::fma(numerics::to_accumulate<A>(grad_y.get(slot)), xhat, column[slot]);
      }
    }
    stack.push(column, leaf, leaf + 1 != params.unit_leaves);
  }
  if (leaf != params.unit_leaves) stack.total(column, leaf);

  Chunk<A> partial;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) partial.set(slot, column[slot]);
  store_chunk(static_cast<A*>(params.partials) + unit * hidden, partial, chunk, hidden,
              aligned.partials);
}

// The aligned tree over runs of `run` units (a power of two) by a thread each, then over the runs.
template <class A, class W>
__global__ void __launch_bounds__(kJoinColumns* kJoinRuns)
    join_kernel(const BackwardParams params, const int64_t run) {
  __shared__ A sums[kJoinRuns][kJoinColumns + 1];
  const int64_t column = int64_t{blockIdx.x} * kJoinColumns + threadIdx.x;
  const int64_t first = threadIdx.y * run;
  const int64_t count = max(int64_t{0}, min(run, params.units - first));
  const A* const partials = static_cast<const A*>(params.partials) + first * params.hidden + column;

  A level[kMaxRunLevels];
  A total = 0;
  if (column < params.hidden) {
    for (int64_t i = 0; i < count; ++i) {
      A carry = partials[i * params.hidden];
#pragma unroll
      for (int l = 0; l < kMaxRunLevels; ++l) {
        if (!((i >> l) & 1)) {
          level[l] = carry;
          break;
        }
        carry = numerics::add(level[l], carry);
      }
    }
#pragma unroll
    for (int l = 0; l < kMaxRunLevels; ++l) {
      if ((count >> l) & 1) total = numerics::add(level[l], total);
    }
  }
  sums[threadIdx.y][threadIdx.x] = total;
  for (int step = 1; step < kJoinRuns; step *= 2) {
    __syncthreads();
    if (threadIdx.y % (2 * step) == 0) {
      total = numerics::add(total, sums[threadIdx.y + step][threadIdx.x]);
      sums[threadIdx.y][threadIdx.x] = total;
    }
  }
  if (threadIdx.y == 0 && column < params.hidden) {
    static_cast<W*>(params.grad_weight)[column] =
        numerics::round_to<W>(numerics::finish_sum(total));
  }
}

// --- Launch ---

template <class X>
cudaError_t launch_columns_as(const BackwardParams& params, cudaStream_t stream) {
  using A = numerics::Accumulate<X>;
  const ColumnsAlignment aligned{chunks_are_aligned<X>(params.x, params.x_layout),
                                 chunks_are_aligned<X>(params.grad_y, params.grad_y_layout),
                                 chunks_are_aligned<A>(params.partials, params.hidden)};
  const int64_t column_blocks = columns_blocks(params.hidden);
  const auto grid = static_cast<unsigned>(params.units * column_blocks);
  const size_t shared = columns_stack_elements(params.unit_leaves) * sizeof(A);
  const cudaError_t error = allow_dynamic_shared(columns_kernel<X>, shared);
  if (error != cudaSuccess) return error;
  columns_kernel<X><<<grid, kColumnsThreads, shared, stream>>>(
      params, static_cast<unsigned>(column_blocks), aligned);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_columns(const BackwardParams& params, cudaStream_t stream) {
  return numerics::visit_x(params.x_dtype, [&](auto x) {
    return launch_columns_as<typename decltype(x)::type>(params, stream);
  });
}

cudaError_t launch_join_partials(const BackwardParams& params, cudaStream_t stream) {
  int64_t run = 1;
  while (run * kJoinRuns < params.units) run *= 2;
  const auto grid = static_cast<unsigned>((params.hidden + kJoinColumns - 1) / kJoinColumns);
  const dim3 block(kJoinColumns, kJoinRuns);
  return numerics::visit_x(params.x_dtype, [&](auto x) {
    using X = typename decltype(x)::type;
    return numerics::visit_weight<X>(params.weight_dtype, [&](auto w) {
      using W = typename decltype(w)::type;
      if constexpr (!std::is_same_v<W, NoWeight>) {
        join_kernel<numerics::Accumulate<X>, W><<<grid, block, 0, stream>>>(params, run);
      }
      return cudaGetLastError();
    });
  });
}

}  // namespace automodel::cuda
