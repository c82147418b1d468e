// y and rstd, and with a residual the sum, which then is what is normalised. Rows of whole aligned
// chunks are held in registers and read once; a cluster shares those that are too long for a block.
// forward_long.cuh has all others.
#pragma once

#include "cuda/forward_long.cuh"
#include "cuda/row_sum.cuh"
#include "numerics/dispatch.h"

namespace automodel::cuda {

using numerics::ForwardParams;

// --- Traits ---

template <class X, class W, class Kind_, bool kAdd_, bool kFewRows>
struct ForwardTraits : Kind_ {
  using Kind = Kind_;
  using Part = RowPart<X, Kind>;
  static constexpr bool kAdd = kAdd_;  // there is a residual
  using Kind::kBlockThreads;
  using Kind::kChunks;
  static constexpr int kInputs = kAdd ? 2 : 1;
  // Rows that a thread holds at once: 64 to 128 bytes in flight, as far as registers go; the
  // shortest rows also share the cost of what is done once a row. A few rows are better spread.
  static constexpr int kRows = Kind::kSpread || kFewRows ? 1
                               : kChunks == 1           ? 16 / static_cast<int>(sizeof(X)) / kInputs
                               : sizeof(X) == 4 || kAdd ? 1
                               : kChunks <= 3           ? 2
                                                        : 1;
  // Threads that a multiprocessor is to hold, which limits the registers of each.
  static constexpr int kHeldWords = kRows * kInputs * kChunks * Chunk<X>::kWords;
  static constexpr int kThreads = kHeldWords > 32 ? 512 : kRows >= 4 ? 768 : 1024;
  static constexpr int kBlocks = kThreads / kBlockThreads;
  static constexpr bool kEarlyWeight =
      std::is_same_v<W, NoWeight> || kChunks * static_cast<int>(sizeof(W)) <= 8;
};

// Calls f(RowKind, RowShape) for the kernel that takes a row; false where none does. A thread holds
// up to kMostChunks chunks of 16-bit elements, or as many bytes of others.
template <class X, bool kAdd, class F>
bool visit_forward_kind(int64_t hidden, const DeviceLimits& limits, F f) {
  constexpr int kMostChunks = 16 / sizeof(X);
  if (visit_short_kind(hidden, f)) return true;
  if (numerics::chunks_in_row(hidden) == 2 * kLargeBlock) {
    f(RowKind<4, 2, kSmallBlock, false>{}, RowShape{kSmallBlock, 1, 1});
    return true;
  }
  return visit_long_kind<kLargeBlock, kMostChunks>(hidden, limits, f);
}

// --- Kernels ---

// The joined slots of the squares of each virtual thread.
template <class A, class X, class Kind>
__device__ __forceinline__ void sum_squares(A (&sum)[Kind::kVirtual],
                                            const Chunk<X> (&x)[Kind::kChunks],
                                            const RowPart<X, Kind>& part) {
#pragma unroll
  for (int v = 0; v < Kind::kVirtual; ++v) {
    A slots[kSlots] = {};
#pragma unroll
    for (int k = v; k < Kind::kChunks; k += Kind::kVirtual) {
      part.for_each_slot(k, [&](int slot) {
        const A value = numerics::to_accumulate<A>(x[k].get(slot));
        slots[slot] = numerics::fma(value, value, slots[slot]);
      });
    }
    sum[v] = join_slots<RowPart<X, Kind>>(slots);
  }
}

// The weights of a thread's chunks: in registers from the beginning, or read for each use.
template <class W, class Traits>
struct Weights {
  using Part = typename Traits::Part;
  const void* weight;
  const Part& part;
  Chunk<W> chunk[Traits::kEarlyWeight ? Traits::kChunks : 1];

  __device__ __forceinline__ Weights(const void* weight, const Part& part)
      : weight(weight), part(part) {
    if constexpr (Traits::kEarlyWeight) {
#pragma unroll
      for (int k = 0; k < Traits::kChunks; ++k) chunk[k] = part.template load_weight<W>(weight, k);
    }
  }

  __device__ __forceinline__ Chunk<W> get(int k) {
    if constexpr (Traits::kEarlyWeight) {
      chunk[k].stay_packed();
      return chunk[k];
    } else {
      return part.template load_weight<W>(weight, k);
    }
  }
};

// y and rstd of this thread's part of a row, from the row's sum of squares.
template <class A, class X, class W, class Traits>
__device__ __forceinline__ void store_row(const ForwardParams& params,
                                          const typename Traits::Part& part, int64_t row, A sum,
                                          Chunk<X> (&x)[Traits::kChunks],
                                          Weights<W, Traits>& weights, A offset) {
  const A rstd = numerics::rstd_of(sum, params.hidden, static_cast<A>(params.eps));
  if (params.rstd != nullptr && part.index == 0) static_cast<A*>(params.rstd)[row] = rstd;
  X* const y_row = static_cast<X*>(params.y) + row * params.hidden;
#pragma unroll
  for (int k = 0; k < Traits::kChunks; ++k) {
    if (!part.has(k)) break;
    x[k].stay_packed();
    const Chunk<W> weight = weights.get(k);
    A y[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const A xhat = numerics::mul(numerics::to_accumulate<A>(x[k].get(slot)), rstd);
      y[slot] = apply_gain(xhat, weight, slot, offset);
    }
    part.store(y_row, k, round_chunk<X>(y));
  }
}

// Makes x of a row its sum with the residual, and stores it.
template <class X, class Kind>
__device__ __forceinline__ void add_residual(const ForwardParams& params,
                                             const RowPart<X, Kind>& part, int64_t row,
                                             Chunk<X> (&x)[Kind::kChunks],
                                             const Chunk<X> (&residual)[Kind::kChunks]) {
  X* const sum_row = static_cast<X*>(params.sum) + row * params.hidden;
#pragma unroll
  for (int k = 0; k < Kind::kChunks; ++k) {
    if (!part.has(k)) break;
    x[k] = add_chunks(x[k], residual[k]);
    part.store(sum_row, k, x[k]);
  }
}

// A block takes kRows times blockDim.y rows, a cluster one.
template <class X, class W, class Traits>
__global__ void __launch_bounds__(Traits::kBlockThreads, Traits::kBlocks)
    forward_kernel(const ForwardParams params) {
  using A = numerics::Accumulate<X>;
  constexpr int kChunks = Traits::kChunks;
  constexpr int kVirtual = Traits::kVirtual;
  constexpr int kRows = Traits::kRows;
  __shared__ RowSums<A, kRows> sums[1];
  const typename Traits::Part part(params.hidden);
  const A offset = gain_offset<A>(params.zero_centered_gamma);
  const auto row_number = [&](int r) {
    return (int64_t{blockIdx.x} / part.blocks * kRows + r) * blockDim.y + threadIdx.y;
  };

  Chunk<X> x[kRows][kChunks];
  Chunk<X> residual[kRows][kChunks];
  const auto load_row = [&](Chunk<X>(&chunks)[kChunks], const void* data,
                            const numerics::RowLayout& layout, int64_t row) {
    const X* const from = row_of<X>(data, layout, row);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) part.load(chunks[k], from, k);
  };
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (row_number(r) >= params.rows) break;
    load_row(x[r], params.x, params.x_layout, row_number(r));
    if constexpr (Traits::kAdd) {
      load_row(residual[r], params.residual, params.residual_layout, row_number(r));
    }
  }
  begin_sums<typename Traits::Kind>(sums);
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
  send_sums(sum, part, sums[0]);
  receive_sums(sum, part, sums[0], 0);

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = row_number(r);
    if (row >= params.rows) break;
    store_row(params, part, row, sum[r][0], x[r], weights, offset);
  }
}

// --- Launch ---

template <class X, class W, class Kind, bool kAdd>
cudaError_t launch_forward_rows(const ForwardParams& params, const RowShape& shape,
                                cudaStream_t stream) {
  const auto launch = [&](auto traits) {
    using Traits = decltype(traits);
    const int64_t rows = int64_t{Traits::kRows} * shape.rows;
    return rows_config((params.rows + rows - 1) / rows, shape.blocks, shape, 0, stream)
        .launch(forward_kernel<X, W, Traits>, params);
  };
  using Traits = ForwardTraits<X, W, Kind, kAdd, false>;
  if constexpr (Traits::kRows >= 4) {
    constexpr int64_t kEnoughBlocks = 4;  // for a multiprocessor
    const int64_t blocks = params.rows / (int64_t{Traits::kRows} * shape.rows);
    if (blocks < kEnoughBlocks * device_limits().multiprocessors) {
      return launch(ForwardTraits<X, W, Kind, kAdd, true>{});
    }
  }
  return launch(Traits{});
}

template <class X>
cudaError_t launch_forward_as(const ForwardParams& params, cudaStream_t stream) {
  return numerics::visit_weight<X>(params.weight_dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    if constexpr (sizeof(X) <= 4) {
      if (rows_are_whole(params)) {
        cudaError_t error = cudaSuccess;
        const auto visit = [&](auto add) {
          constexpr bool kAdd = add;
          return visit_forward_kind<X, kAdd>(
              params.hidden, device_limits(), [&](auto kind, const RowShape& shape) {
                error = launch_forward_rows<X, W, decltype(kind), kAdd>(params, shape, stream);
              });
        };
        const bool found =
            params.residual != nullptr ? visit(std::true_type{}) : visit(std::false_type{});
        if (found) return error;
      }
    }
    return launch_forward_long<X, W>(params, stream);
  });
}

}  // namespace automodel::cuda
