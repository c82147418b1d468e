// y and rstd, and with a residual the sum, which then is what is normalised. Rows of whole aligned
// chunks are held in registers and read once; a cluster shares those that are too long for a block.
// forward_long.cuh has all others.
#pragma once

#include <algorithm>

#include "cuda/forward_long.cuh"
#include "cuda/row_stages.cuh"
#include "cuda/row_sum.cuh"
#include "numerics/dispatch.h"

namespace automodel::cuda {

using numerics::ForwardParams;

// --- Traits ---

template <class X, class W, class Kind_, bool kAdd_>
struct ForwardTraits : Kind_ {
  using Kind = Kind_;
  static constexpr bool kAdd = kAdd_;  // there is a residual
  using Kind::kBlockThreads;
  using Kind::kChunks;
  static constexpr int kInputs = kAdd ? 2 : 1;
  // Rows that a thread holds at once: 64 to 128 bytes in flight, as far as registers go; the
  // shortest rows also share the cost of what is done once a row.
  static constexpr int kRows = Kind::kSpread            ? 1
                               : kChunks == 1           ? 16 / static_cast<int>(sizeof(X)) / kInputs
                               : sizeof(X) == 4 || kAdd ? 1
                               : kChunks <= 3           ? 2
                                                        : 1;
  // Threads that a multiprocessor is to hold, which limits the registers of each.
  static constexpr int kThreads = kRows == 8 ? 768 : sizeof(X) == 4 && kRows == 1 ? 1280 : 1024;
  static constexpr int kBlocks = kThreads / kBlockThreads;
  static constexpr bool kEarlyWeight =
      std::is_same_v<W, NoWeight> || kChunks * static_cast<int>(sizeof(W)) <= 8;
  static constexpr int kStages = 2;
  using Stages = RowStages<X, Kind, kInputs * kRows, kStages>;
};

// Blocks and steps of the kernel for rows that a cluster shares.
constexpr int64_t kStagedBlocks = 4096;
constexpr int64_t kMaxSteps = 8;

// --- Kernels ---

// The joined slots of the squares of each virtual thread.
template <class A, class X, class Kind>
__device__ __forceinline__ void sum_squares(A (&sum)[Kind::kVirtual],
                                            const Chunk<X> (&x)[Kind::kChunks],
                                            const RowPart<Kind>& part) {
  A slots[Kind::kVirtual][kSlots] = {};
#pragma unroll
  for (int k = 0; k < Kind::kChunks; ++k) {
    if (!part.has(k)) break;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const A value = numerics::to_accumulate<A>(x[k].get(slot));
      A& acc = slots[k % Kind::kVirtual][slot];
      acc = numerics::fma(value, value, acc);
    }
  }
#pragma unroll
  for (int v = 0; v < Kind::kVirtual; ++v) sum[v] = join_slots(slots[v]);
}

// The weights of a thread's chunks: in registers from the beginning, or read for each use.
template <class W, class Traits>
struct Weights {
  const void* weight;
  const RowPart<typename Traits::Kind>& part;
  Chunk<W> chunk[Traits::kEarlyWeight ? Traits::kChunks : 1];

  __device__ __forceinline__ Weights(const void* weight, const RowPart<typename Traits::Kind>& part)
      : weight(weight), part(part) {
    if constexpr (Traits::kEarlyWeight) {
#pragma unroll
      for (int k = 0; k < Traits::kChunks; ++k) {
        if (part.has(k)) chunk[k] = load_whole_weight<W>(weight, part.chunk(k));
      }
    }
  }

  __device__ __forceinline__ Chunk<W> get(int k) {
    if constexpr (Traits::kEarlyWeight) {
      chunk[k].stay_packed();
      return chunk[k];
    } else {
      return load_whole_weight<W>(weight, part.chunk(k));
    }
  }
};

// y and rstd of this thread's part of a row, from the row's sum of squares.
template <class A, class X, class W, class Traits, class Kind, int kChunks>
__device__ __forceinline__ void store_row(const ForwardParams& params, const RowPart<Kind>& part,
                                          int64_t row, A sum, Chunk<X> (&x)[kChunks],
                                          Weights<W, Traits>& weights, A offset) {
  const A rstd = numerics::rstd_of(sum, params.hidden, static_cast<A>(params.eps));
  if (params.rstd != nullptr && part.index == 0) static_cast<A*>(params.rstd)[row] = rstd;
  X* const y_row = static_cast<X*>(params.y) + row * params.hidden;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (!part.has(k)) break;
    x[k].stay_packed();
    const Chunk<W> weight = weights.get(k);
    A y[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const A xhat = numerics::mul(numerics::to_accumulate<A>(x[k].get(slot)), rstd);
      y[slot] = apply_gain(xhat, weight, slot, offset);
    }
    store_whole_chunk(y_row, part.chunk(k), round_chunk<X>(y));
  }
}

// Makes x of a row its sum with the residual, and stores it.
template <class X, class Kind, int kChunks>
__device__ __forceinline__ void add_residual(const ForwardParams& params, const RowPart<Kind>& part,
                                             int64_t row, Chunk<X> (&x)[kChunks],
                                             const Chunk<X> (&residual)[kChunks]) {
  X* const sum_row = static_cast<X*>(params.sum) + row * params.hidden;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (!part.has(k)) break;
    x[k] = add_chunks(x[k], residual[k]);
    store_whole_chunk(sum_row, part.chunk(k), x[k]);
  }
}

// A block takes kRows times blockDim.y rows.
template <class X, class W, class Traits>
__global__ void __launch_bounds__(Traits::kBlockThreads, Traits::kBlocks)
    forward_kernel(const ForwardParams params) {
  using A = numerics::Accumulate<X>;
  constexpr int kChunks = Traits::kChunks;
  constexpr int kVirtual = Traits::kVirtual;
  constexpr int kRows = Traits::kRows;
  static_assert(!Traits::kSpread, "a cluster's rows are staged");
  __shared__ RowSums<A, kRows> sums;
  const RowPart<typename Traits::Kind> part(params.hidden);
  const A offset = gain_offset<A>(params.zero_centered_gamma);
  const auto row_number = [&](int r) {
    return (int64_t{blockIdx.x} * kRows + r) * blockDim.y + threadIdx.y;
  };

  Chunk<X> x[kRows][kChunks];
  Chunk<X> residual[kRows][kChunks];
  const auto load_row = [&](Chunk<X>(&chunks)[kChunks], const void* data,
                            const numerics::RowLayout& layout, int64_t row) {
    const X* const from = row_of<X>(data, layout, row);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (part.has(k)) chunks[k] = load_whole_chunk(from, part.chunk(k));
    }
  };
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (row_number(r) >= params.rows) break;
    load_row(x[r], params.x, params.x_layout, row_number(r));
    if constexpr (Traits::kAdd) {
      load_row(residual[r], params.residual, params.residual_layout, row_number(r));
    }
  }
  Weights<W, Traits> weights(params.weight, part);
  if constexpr (Traits::kAdd) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row_number(r) >= params.rows) break;
      add_residual(params, part, row_number(r), x[r], residual[r]);
    }
  }

  A sum[kRows][kVirtual];
#pragma unroll
  for (int r = 0; r < kRows; ++r) sum_squares(sum[r], x[r], part);
  join_rows(sum, part, sums, 0);

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = row_number(r);
    if (row >= params.rows) break;
    store_row(params, part, row, sum[r][0], x[r], weights, offset);
  }
}

// The same by stages: a block, or a cluster, takes steps times as many rows, and the next ones are
// on their way while these are summed.
template <class X, class W, class Traits>
__global__ void __launch_bounds__(Traits::kBlockThreads, Traits::kBlocks)
    forward_staged_kernel(const ForwardParams params, const int steps) {
  using A = numerics::Accumulate<X>;
  constexpr int kChunks = Traits::kChunks;
  constexpr int kVirtual = Traits::kVirtual;
  constexpr int kRows = Traits::kRows;
  constexpr int kStages = Traits::kStages;
  __shared__ RowSums<A, kRows> sums[2];
  begin_sums<typename Traits::Kind>(sums);
  const RowPart<typename Traits::Kind> part(params.hidden);
  const A offset = gain_offset<A>(params.zero_centered_gamma);
  const int64_t step_rows = int64_t{kRows} * blockDim.y;
  const int64_t first = blockIdx.x / part.blocks * steps * step_rows;
  const int block_steps =
      static_cast<int>(min(int64_t{steps}, (params.rows - first + step_rows - 1) / step_rows));
  const auto row_number = [&](int i, int r) {
    return first + i * step_rows + r * blockDim.y + threadIdx.y;
  };

  typename Traits::Stages stages(dynamic_shared<uint4>(), part);
  const auto start = [&](int i, int stage) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = row_number(i, r);
      if (i >= block_steps || row >= params.rows) break;
      stages.start(stage, r, row_of<X>(params.x, params.x_layout, row));
      if constexpr (Traits::kAdd) {
        stages.start(stage, kRows + r, row_of<X>(params.residual, params.residual_layout, row));
      }
    }
    stages.commit();
  };
#pragma unroll
  for (int i = 0; i < kStages; ++i) start(i, i);
  Weights<W, Traits> weights(params.weight, part);

  int stage = 0;
#pragma unroll 1
  for (int i = 0; i < block_steps; ++i) {
    stages.wait();
    Chunk<X> x[kRows][kChunks];
    A sum[kRows][kVirtual];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) x[r][k] = stages.read(stage, r, k);
      if constexpr (Traits::kAdd) {
        if (row_number(i, r) < params.rows) {
          Chunk<X> residual[kChunks];
#pragma unroll
          for (int k = 0; k < kChunks; ++k) residual[k] = stages.read(stage, kRows + r, k);
          add_residual(params, part, row_number(i, r), x[r], residual);
        }
      }
      sum_squares(sum[r], x[r], part);
    }
    stages.release();
    start(i + kStages, stage);
    stage = stage + 1 < kStages ? stage + 1 : 0;
    join_rows(sum, part, sums[i % 2], i / 2 % 2);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row_number(i, r) >= params.rows) break;
      store_row(params, part, row_number(i, r), sum[r][0], x[r], weights, offset);
    }
  }
}

// --- Launch ---

template <class X, class W, class Kind, bool kAdd>
cudaError_t launch_forward_rows(const ForwardParams& params, const RowShape& shape,
                                cudaStream_t stream) {
  using Traits = ForwardTraits<X, W, Kind, kAdd>;
  const int64_t rows = int64_t{Traits::kRows} * shape.rows;
  if constexpr (Kind::kSpread) {
    if (Traits::Stages::kBytes > device_limits().shared_per_block) {
      return launch_forward_long<X, W>(params, stream);
    }
    const int64_t steps =
        std::clamp<int64_t>(params.rows * shape.blocks / kStagedBlocks, 1, kMaxSteps);
    return rows_config((params.rows + steps * rows - 1) / (steps * rows), shape.blocks, shape,
                       Traits::Stages::kBytes, stream)
        .launch(forward_staged_kernel<X, W, Traits>, params, static_cast<int>(steps));
  } else {
    return rows_config((params.rows + rows - 1) / rows, 1, shape, 0, stream)
        .launch(forward_kernel<X, W, Traits>, params);
  }
}

template <class X>
cudaError_t launch_forward_as(const ForwardParams& params, cudaStream_t stream) {
  return numerics::visit_weight<X>(params.weight_dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    if constexpr (sizeof(X) <= 4) {
      cudaError_t error = cudaSuccess;
      if (rows_are_whole(params) &&
          visit_row_kind(params.hidden, device_limits(), [&](auto kind, const RowShape& shape) {
            using Kind = decltype(kind);
            error = params.residual != nullptr
                        ? launch_forward_rows<X, W, Kind, true>(params, shape, stream)
                        : launch_forward_rows<X, W, Kind, false>(params, shape, stream);
          })) {
        return error;
      }
    }
    return launch_forward_long<X, W>(params, stream);
  });
}

}  // namespace automodel::cuda
