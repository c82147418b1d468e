// y and rstd, and with a residual the sum, which then is what is normalised. Rows of whole aligned
// chunks are held in registers and read once; a cluster shares those that are too long for a block.
// forward_long.cuh has all others.
#pragma once

#include "cuda/forward_long.cuh"
#include "cuda/gains.cuh"
#include "cuda/lane_rows.cuh"
#include "cuda/row_sum.cuh"
#include "numerics/dispatch.h"

namespace automodel::cuda {

using numerics::ForwardParams;

// --- Traits ---

// Rows that a thread holds at once where there are many: 64 to 128 bytes in flight, as far as
// registers go.
template <class X, class Kind, bool kAdd>
constexpr int most_rows() {
  if (Kind::kSpread) return 1;
  if (Kind::kChunks == 1) return 4;
  return sizeof(X) == 2 && !kAdd && Kind::kChunks <= 3 ? 2 : 1;
}

template <class X, class W, class Kind_, bool kAdd_, int kRows_>
struct ForwardTraits : Kind_ {
  using A = numerics::Accumulate<X>;
  using Kind = Kind_;
  using Part = RowPart<X, Kind>;
  static constexpr bool kAdd = kAdd_;  // there is a residual
  static constexpr int kRows = kRows_;
  using Kind::kBlockThreads;
  using Kind::kChunks;
  // Threads that a multiprocessor is to hold, which limits the registers of each; every row needs
  // some beside what is held of it.
  static constexpr int kHeldWords = kRows * (kAdd ? 2 : 1) * kChunks * Chunk<X>::kWords;
  static constexpr int kThreads = kHeldWords > 32 ? 512 : kHeldWords * kRows > 64 ? 768 : 1024;
  static constexpr int kBlocks = kThreads / kBlockThreads;
  // The shortest rows are kMinVirtualThreads lanes, which take several at once.
  static constexpr bool kLaneRows = kChunks == 1;
  static constexpr bool kPacked =
      std::is_same_v<W, NoWeight> || kChunks * static_cast<int>(sizeof(W)) <= 8;
  // A weight that registers do not hold is copied ahead of time where that is faster, and as far as
  // half of a multiprocessor's shared memory goes.
  static constexpr bool kStages =
      !kPacked && kBlockThreads == kLargeBlock && (kAdd || sizeof(W) == 2);
  static constexpr int kMostStaged =
      128 * 1024 / (kBlocks * kSlots * int{sizeof(W)} * kBlockThreads);
  static constexpr int kStaged = !kStages ? 0 : kChunks < kMostStaged ? kChunks : kMostStaged;
  using LateGains = cuda::LateGains<A, W, Part, kStaged>;
  using Gains = std::conditional_t<kLaneRows, HeldGains<A, W, Part>,
                                   std::conditional_t<kPacked, PackedGains<A, W, Part>, LateGains>>;
  static constexpr int kShared = LateGains::kBytes;
};

// Calls f(RowKind, RowShape) for the kernel that takes a row; false where none does. A thread holds
// up to kMostChunks chunks of 16-bit elements, or as many bytes of others.
template <class X, bool kAdd, class F>
bool visit_forward_kind(const ForwardParams& params, const DeviceLimits& limits, F f) {
  constexpr int kMostChunks = 16 / sizeof(X);
  const int64_t hidden = params.hidden;
  if (visit_short_kind(hidden, f)) return true;
  const bool few_rows = params.rows <= limits.multiprocessors;
  if (numerics::chunks_in_row(hidden) == 2 * kLargeBlock && !few_rows) {
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

// y of this thread's part of a row.
template <class A, class X, class Traits>
__device__ __forceinline__ void store_row(const ForwardParams& params,
                                          const typename Traits::Part& part, int64_t row, A rstd,
                                          Chunk<X> (&x)[Traits::kChunks],
                                          typename Traits::Gains& gains) {
  X* const y_row = static_cast<X*>(params.y) + row * params.hidden;
#pragma unroll
  for (int k = 0; k < Traits::kChunks; ++k) {
    if (!part.has(k)) break;
    x[k].stay_packed();
    const auto chunk_gains = gains.get(k);
    A y[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const A xhat = numerics::mul(numerics::to_accumulate<A>(x[k].get(slot)), rstd);
      y[slot] = chunk_gains.apply(xhat, slot);
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
  typename Traits::Gains gains(params.weight, params.zero_centered_gamma, part);
  if constexpr (Traits::kAdd) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row_number(r) >= params.rows) break;
      add_residual(params, part, row_number(r), x[r], residual[r]);
    }
  }

  // Of rows beyond the last too, whose x was not read, for all lanes join sums and meet at barriers.
  A sum[kRows][kVirtual];
#pragma unroll
  for (int r = 0; r < kRows; ++r) sum_squares(sum[r], x[r], part);
  const auto finish = [&](A row_sum, int64_t row, bool first) {
    const A rstd = numerics::rstd_of(row_sum, params.hidden, static_cast<A>(params.eps));
    if (params.rstd != nullptr && first && row < params.rows) {
      static_cast<A*>(params.rstd)[row] = rstd;
    }
    return rstd;
  };
  A rstd[kRows];
  if constexpr (Traits::kLaneRows) {
    using Rows = LaneRows<Traits::Part::kPieces, kRows>;
    const int own_row = Rows::row_of(part.index);
    const A own =
        finish(Rows::join(sum), row_number(own_row), part.index == Rows::lane_of(own_row));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rstd[r] = __shfl_sync(kAllLanes, own, Rows::lane_of(r), numerics::kMinVirtualThreads);
    }
  } else {
    send_sums(sum, part, sums[0]);
    receive_sums(sum, part, sums[0], 0);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rstd[r] = finish(sum[r][0], row_number(r), part.index == 0);
    }
  }

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = row_number(r);
    if (row >= params.rows) break;
    store_row<A, X, Traits>(params, part, row, rstd[r], x[r], gains);
  }
}

// --- Launch ---

template <class X, class W, class Kind, bool kAdd>
cudaError_t launch_forward_rows(const ForwardParams& params, RowShape shape, cudaStream_t stream) {
  const auto blocks = [&](int thread_rows) {
    const int64_t rows = thread_rows * shape.rows;
    return (params.rows + rows - 1) / rows;
  };
  const auto launch = [&](auto rows) {
    using Traits = ForwardTraits<X, W, Kind, kAdd, rows>;
    if (Traits::kShared > static_cast<int>(device_limits().shared_per_block)) {
      return launch_forward_long<X, W>(params, stream);
    }
    return rows_config(blocks(rows), shape.blocks, shape, Traits::kShared, stream)
        .launch(forward_kernel<X, W, Traits>, params);
  };
  constexpr int kMost = most_rows<X, Kind, kAdd>();
  const int64_t multiprocessors = device_limits().multiprocessors;
  if constexpr (kMost > 1) {
    constexpr int64_t kEnoughBlocks = 3;  // for a multiprocessor
    if (blocks(kMost) >= kEnoughBlocks * multiprocessors) {
      // Where rows need no barrier, blocks of a warp, which end and make room one by one.
      if (Kind::kChunks == 1) shape.rows = kWarp / shape.threads;
      return launch(std::integral_constant<int, kMost>{});
    }
  }
  while (shape.rows / 2 * shape.threads >= kWarp && blocks(1) < multiprocessors) shape.rows /= 2;
  return launch(std::integral_constant<int, 1>{});
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
              params, device_limits(), [&](auto kind, const RowShape& shape) {
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
