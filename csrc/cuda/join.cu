// grad_weight from the partial sums of all units.
#include "cuda/alignment.h"
#include "cuda/chunk.cuh"
#include "cuda/launch.h"
#include "cuda/launch_config.cuh"
#include "numerics/dispatch.h"

namespace automodel::cuda {
namespace {

using numerics::BackwardParams;

// --- Traits ---

constexpr int kJoinThreads = 8;    // across a row
constexpr int kJoinWidth = 4;      // columns of a thread
constexpr int kMaxJoinRuns = 128;  // threads down the units
constexpr int kJoinBatch = 8;      // units that a thread reads at once
constexpr int kMaxRunLevels = 22;  // of batches in a run, more than memory has rows

// --- Kernels ---

// Neighbouring columns' sums.
template <class A>
struct alignas(16) Columns {
  A of[kJoinWidth];
};

template <class A>
__device__ __forceinline__ Columns<A> add(Columns<A> a, const Columns<A>& b) {
#pragma unroll
  for (int i = 0; i < kJoinWidth; ++i) a.of[i] = numerics::add(a.of[i], b.of[i]);
  return a;
}

template <class A>
__device__ __forceinline__ Columns<A> load_columns(const A* from, int width, bool aligned) {
  if (aligned && width >= kJoinWidth) return *reinterpret_cast<const Columns<A>*>(from);
  Columns<A> columns{};
#pragma unroll
  for (int i = 0; i < kJoinWidth; ++i) {
    if (i < width) columns.of[i] = from[i];
  }
  return columns;
}

// The aligned tree over runs of `run` units (a power of two) by a thread each, then over the runs
// of a block; kJoinWidth columns a thread, kJoinBatch units read at once. Columns past the end of a
// row, and of a row that is no multiple of kJoinWidth, are read one by one.
template <class A, class W>
__global__ void __launch_bounds__(kJoinThreads* kMaxJoinRuns)
    join_kernel(const BackwardParams params, const int64_t run, const bool aligned) {
  __shared__ Columns<A> sums[kMaxJoinRuns][kJoinThreads];
  wait_for_previous_kernel();
  const int64_t column = (int64_t{blockIdx.x} * kJoinThreads + threadIdx.x) * kJoinWidth;
  const int width = static_cast<int>(min(int64_t{kJoinWidth}, params.hidden - column));
  const int64_t first = threadIdx.y * run;
  const int64_t count = max(int64_t{0}, min(run, params.units - first));
  const A* const partials = static_cast<const A*>(params.partials) + first * params.hidden + column;

  Columns<A> level[kMaxRunLevels];
  Columns<A> total{};
  const int64_t batches = (count + kJoinBatch - 1) / kJoinBatch;
  for (int64_t batch = 0; batch < batches; ++batch) {
    Columns<A> value[kJoinBatch];
#pragma unroll
    for (int i = 0; i < kJoinBatch; ++i) {
      const int64_t unit = batch * kJoinBatch + i;
      value[i] = unit < count ? load_columns(partials + unit * params.hidden, width, aligned)
                              : Columns<A>{};
    }
#pragma unroll
    for (int step = 1; step < kJoinBatch; step *= 2) {
#pragma unroll
      for (int i = 0; i < kJoinBatch; i += 2 * step) value[i] = add(value[i], value[i + step]);
    }
    Columns<A> carry = value[0];
    const int depth = numerics::tree_depth(batch);
    for (int l = 0; l < depth; ++l) carry = add(level[l], carry);
    level[depth] = carry;
  }
  for (int l = 0; batches >> l != 0; ++l) {
    if ((batches >> l) & 1) total = add(level[l], total);
  }
  sums[threadIdx.y][threadIdx.x] = total;
  for (int step = 1; step < blockDim.y; step *= 2) {
    __syncthreads();
    if (threadIdx.y % (2 * step) == 0) {
      total = add(total, sums[threadIdx.y + step][threadIdx.x]);
      sums[threadIdx.y][threadIdx.x] = total;
    }
  }
  if (threadIdx.y != 0) return;
#pragma unroll
  for (int i = 0; i < kJoinWidth; ++i) {
    if (i < width) {
      static_cast<W*>(params.grad_weight)[column + i] =
          numerics::round_to<W>(numerics::finish_sum(total.of[i]));
    }
  }
}

// --- Launch ---

}  // namespace

cudaError_t launch_join_partials(const BackwardParams& params, cudaStream_t stream) {
  const auto up_to_power = [](int64_t n) {
    int64_t power = 1;
    while (power < n) power *= 2;
    return power;
  };
  const int64_t runs =
      std::min(up_to_power((params.units + kJoinBatch - 1) / kJoinBatch), int64_t{kMaxJoinRuns});
  const int64_t run = up_to_power((params.units + runs - 1) / runs);
  constexpr int kBlockColumns = kJoinThreads * kJoinWidth;
  LaunchConfig config(
      dim3(static_cast<unsigned>((params.hidden + kBlockColumns - 1) / kBlockColumns)),
      dim3(kJoinThreads, static_cast<unsigned>(runs)), 0, stream);
  if (device_limits().overlap) config.overlap_previous_kernel();
  return numerics::visit_x(params.x_dtype, [&](auto x) {
    using X = typename decltype(x)::type;
    using A = numerics::Accumulate<X>;
    return numerics::visit_weight<X>(params.weight_dtype, [&](auto w) {
      using W = typename decltype(w)::type;
      if constexpr (!std::is_same_v<W, NoWeight>) {
        return config.launch(join_kernel<A, W>, params, run, partials_are_aligned(params));
      }
      return cudaSuccess;
    });
  });
}

}  // namespace automodel::cuda
