// grad_x, and grad_weight's partial sums with it. Two ways, both with the same bits:
//
// fused: rows of whole aligned chunks. A block, or a cluster, takes a unit of rows and keeps the
// columns' sums beside them, so x and grad_y are read once.
//
// long (backward_long.cuh): any others, very long rows, float64, few rows, and grad_weight alone.
#pragma once

#include "cuda/backward_long.cuh"
#include "cuda/backward_plan.h"
#include "cuda/gains.cuh"
#include "cuda/row_stages.cuh"
#include "cuda/row_sum.cuh"
#include "cuda/tree_stack.cuh"
#include "numerics/dispatch.h"

namespace automodel::cuda {

// --- Traits ---

template <class X, class W, class Kind_, bool kAdd_, bool kWantWeight_>
struct BackwardTraits : Kind_ {
  using Kind = Kind_;
  using Part = RowPart<X, Kind>;
  static constexpr bool kAdd = kAdd_;  // there is a gradient of the sum
  using Kind::kBlockThreads;
  using Kind::kChunks;
  static constexpr int kElements = kChunks * kSlots;
  static constexpr int kStages = backward_stages<Kind>(sizeof(X), kAdd ? 3 : 2);
  static constexpr bool kWantWeight = kWantWeight_;
  // Blocks that a multiprocessor is to hold, which limits the registers of a thread.
  static constexpr int kThreads = !kWantWeight && kChunks <= 2 ? 2 * kLargeBlock : kLargeBlock;
  static constexpr int kBlocks = kThreads / kBlockThreads;
  static constexpr bool kKeepRow =
      sizeof(X) == 2 && kChunks == 3 && !kAdd;  // in registers, rather than read it again
  using Stages = RowStages<X, Kind, kAdd ? 3 : 2, kStages>;
  static_assert(Stages::kBytes >= kElements * kBlockThreads * int{sizeof(numerics::Accumulate<X>)},
                "columns are joined where the rows were");
};

// --- Kernels ---

// A block of (threads, slices), or a cluster that shares rows, takes a part of a unit: slice s its
// s-th aligned subtree of leaves. The unit_blocks blocks of a unit are a cluster.
template <class X, class W, class Traits>
__global__ void __launch_bounds__(Traits::kBlockThreads, Traits::kBlocks)
    backward_kernel(const BackwardParams params, const int unit_blocks) {
  using A = numerics::Accumulate<X>;
  constexpr int kChunks = Traits::kChunks;
  constexpr int kVirtual = Traits::kVirtual;
  constexpr int kStages = Traits::kStages;
  constexpr bool kWantWeight = Traits::kWantWeight;
  __shared__ RowSums<A, 1> sums[2];
  begin_sums<typename Traits::Kind>(sums);
  const typename Traits::Part part(params.hidden);
  const int slices = blockDim.y;
  const int64_t unit = blockIdx.x / (unit_blocks * part.blocks);
  const int rank = static_cast<int>(blockIdx.x / part.blocks % unit_blocks);  // of its blocks
  const int slice_leaves =
      static_cast<int>(numerics::leaves_of(params.units, unit)) / (unit_blocks * slices);
  const int slice_rows = slice_leaves * kLeafRows;
  const int64_t block_row =
      numerics::first_leaf_of(params.units, unit) * kLeafRows + rank * (slice_rows * slices);
  const int64_t first = block_row + int64_t{slice_rows} * threadIdx.y;
  const auto rows_left = [&](int64_t from) {
    return static_cast<int>(max(int64_t{0}, min(int64_t{slice_rows}, params.rows - from)));
  };
  const int own_rows = rows_left(first);
  const int block_rows = rows_left(block_row);  // the first slice has the most

  uint4* const memory = dynamic_shared<uint4>();
  typename Traits::Stages stages(memory, part);
  const auto start = [&](int i, int stage) {
    if (i < own_rows) {
      stages.start(stage, 0, row_of<X>(params.x, params.x_layout, first + i));
      stages.start(stage, 1, row_of<X>(params.grad_y, params.grad_y_layout, first + i));
      if constexpr (Traits::kAdd) {
        stages.start(stage, 2, row_of<X>(params.grad_sum, params.grad_sum_layout, first + i));
      }
    }
    stages.commit();
  };
#pragma unroll
  for (int i = 0; i < kStages; ++i) start(i, i);

  const HeldGains<A, W, typename Traits::Part> gains(params.weight, params.zero_centered_gamma,
                                                     part);
  TreeStack<A, Traits::kElements, Traits::kBlockThreads> stack(
      reinterpret_cast<A*>(memory + Traits::Stages::kBytes / sizeof(uint4)));
  A column[Traits::kElements] = {};
  const A* const rstds = static_cast<const A*>(params.rstd) + first;
  X* grad_x_row = static_cast<X*>(params.grad_x) + first * params.hidden;
  const A hidden = static_cast<A>(params.hidden);

  A next_rstd = own_rows > 0 ? rstds[0] : A(0);

#pragma unroll 1
  for (int i = 0; i < block_rows; ++i) {
    const int stage = i % kStages;
    const A rstd = next_rstd;
    if (i + 1 < own_rows) next_rstd = rstds[i + 1];
    stages.wait();
    Chunk<X> x[kChunks];
    Chunk<X> grad_y[kChunks];
    const auto read = [&](int k) {
      x[k] = stages.read(stage, 0, k);
      grad_y[k] = stages.read(stage, 1, k);
    };
    // body(slot, grad_y, t, xhat) for the elements of a chunk.
    const auto for_each_slot = [&](int k, const auto& body) {
      part.for_each_slot(k, [&](int slot) {
        const A g = numerics::to_accumulate<A>(grad_y[k].get(slot));
        const A xhat = numerics::mul(numerics::to_accumulate<A>(x[k].get(slot)), rstd);
        body(slot, g, gains.get(k).apply(g, slot), xhat);
      });
    };

    A sum[1][kVirtual];
#pragma unroll
    for (int v = 0; v < kVirtual; ++v) {
      A slots[kSlots] = {};
#pragma unroll
      for (int k = v; k < kChunks; k += kVirtual) {
        if (!part.has(k)) break;
        read(k);
        for_each_slot(k, [&](int slot, A, A t, A xhat) {
          slots[slot] = numerics::fma(t, xhat, slots[slot]);
        });
      }
      sum[0][v] = join_slots<typename Traits::Part>(slots);
    }
    if constexpr (Traits::kKeepRow) start(i + kStages, stage);
    send_sums(sum, part, sums[i % 2]);
    receive_sums(sum, part, sums[i % 2], i / 2 % 2);
    const A mean = numerics::div(sum[0][0], hidden);

    if (i < own_rows) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        if (!part.has(k)) break;
        if constexpr (Traits::kKeepRow) {
          x[k].stay_packed();
          grad_y[k].stay_packed();
        } else {
          read(k);
        }
        A grad_x[kSlots];
        for_each_slot(k, [&](int slot, A g, A t, A xhat) {
          grad_x[slot] = numerics::mul(rstd, numerics::fma(-xhat, mean, t));
          if constexpr (kWantWeight) {
            A& acc = column[k * kSlots + slot];
            acc = numerics::fma(g, xhat, acc);
          }
        });
        if constexpr (Traits::kAdd) add_chunk(grad_x, stages.read(stage, 2, k));
        part.store(grad_x_row, k, round_chunk<X>(grad_x));
      }
      grad_x_row += params.hidden;
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
    if constexpr (!Traits::kKeepRow) start(i + kStages, stage);
  }

  if constexpr (kWantWeight) {
    let_next_kernel_begin();
    __syncthreads();  // nobody reads rows from the stages' memory any more
    A* const meeting = reinterpret_cast<A*>(memory);
    join_slices<Traits::kBlockThreads>(column, meeting, blockDim.x);
    A* const partial = static_cast<A*>(params.partials) + unit * params.hidden;
    const auto finish = [&](int k, int thread, const A(&sum)[kSlots]) {
      part.of_thread(thread).store(partial, k, round_chunk<A>(sum));
    };
#if defined(AUTOMODEL_HAS_CLUSTERS)
    if constexpr (!Traits::kSpread) {
      if (unit_blocks > 1) {
        join_blocks<Traits::kBlockThreads>(column, meeting, finish);
        return;
      }
    }
#endif
    if (threadIdx.y != 0) return;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      A sum[kSlots];
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) sum[slot] = column[k * kSlots + slot];
      finish(k, threadIdx.x, sum);
    }
  }
}

// --- Launch ---

template <class X, class W, class Kind, bool kAdd, bool kWantWeight>
cudaError_t launch_fused(const BackwardParams& params, const BackwardPlan& plan,
                         const RowShape& shape, cudaStream_t stream) {
  using Traits = BackwardTraits<X, W, Kind, kAdd, kWantWeight>;
  if (plan.shared < Traits::Stages::kBytes) return cudaErrorInvalidValue;
  return rows_config(params.units.count, plan.unit_blocks * shape.blocks, shape, plan.shared,
                     stream)
      .launch(backward_kernel<X, W, Traits>, params, plan.unit_blocks);
}

template <class X>
cudaError_t launch_backward_as(const BackwardParams& params, const BackwardPlan& plan,
                               cudaStream_t stream) {
  return numerics::visit_weight<X>(params.weight_dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    if constexpr (sizeof(X) <= 4) {
      if (plan.fused) {
        cudaError_t error = cudaSuccess;
        const auto launch = [&](auto kind, const RowShape& shape, auto want) {
          using Kind = decltype(kind);
          constexpr bool kWantWeight = want && !std::is_same_v<W, NoWeight>;
          error = params.grad_sum != nullptr
                      ? launch_fused<X, W, Kind, true, kWantWeight>(params, plan, shape, stream)
                      : launch_fused<X, W, Kind, false, kWantWeight>(params, plan, shape, stream);
        };
        visit_backward_kind(params, device_limits(), launch);
        return error;
      }
    }
    return launch_backward_long<X, W>(params, stream);
  });
}

}  // namespace automodel::cuda
