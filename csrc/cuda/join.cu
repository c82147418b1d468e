// grad_weight from the partial sums of all units.
#include "cuda/alignment.h"
#include "cuda/backward_plan.h"
#include "cuda/chunk.cuh"
#include "cuda/launch.h"
#include "cuda/launch_config.cuh"
#include "numerics/dispatch.h"

namespace automodel::cuda {
namespace {

using numerics::BackwardParams;
using numerics::Units;

// --- Traits ---

constexpr int kJoinThreads = 8;    // across a row
constexpr int kJoinWidth = 4;      // columns of a thread
constexpr int kMaxJoinRuns = 128;  // threads down the units
constexpr int kMaxRunLevels = 23;  // of batches in a run, more than memory has rows

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

// The aligned tree over runs of `run` halves of units (a power of two) by a thread each, then over
// the runs of a block; kJoinWidth columns a thread, kUnitsBatch units read at once, all of them
// whole or none: batches of whole units come first, each in the place of two. Columns past the end
// of a row, and of a row that is no multiple of kJoinWidth, are read one by one.
template <class A, class W>
__global__ void __launch_bounds__(kJoinThreads* kMaxJoinRuns)
    join_kernel(const BackwardParams params, const int64_t run, const bool aligned) {
  __shared__ Columns<A> sums[kMaxJoinRuns][kJoinThreads];
  wait_for_previous_kernel();
  const int64_t column = (int64_t{blockIdx.x} * kJoinThreads + threadIdx.x) * kJoinWidth;
  const int width = static_cast<int>(min(int64_t{kJoinWidth}, params.hidden - column));
  const Units& units = params.units;
  const int64_t end_of_whole = 2 * units.whole;
  const int64_t first = threadIdx.y * run;
  const int64_t last = min(first + run, units.whole + units.count);
  const A* const partials = static_cast<const A*>(params.partials) + column;

  Columns<A> level[kMaxRunLevels];
  Columns<A> total{};
  int64_t batches = 0;  // of halves
  for (int64_t half = first; half < last;) {
    const bool whole = half < end_of_whole;
    const int64_t unit = whole ? half / 2 : half - units.whole;
    const int64_t end = whole ? units.whole : units.count;
    Columns<A> value[kUnitsBatch];
#pragma unroll
    for (int i = 0; i < kUnitsBatch; ++i) {
      value[i] = unit + i < end
                     ? load_columns(partials + (unit + i) * params.hidden, width, aligned)
                     : Columns<A>{};
    }
#pragma unroll
    for (int step = 1; step < kUnitsBatch; step *= 2) {
#pragma unroll
      for (int i = 0; i < kUnitsBatch; i += 2 * step) value[i] = add(value[i], value[i + step]);
    }
    Columns<A> carry = value[0];
    int depth = whole ? 1 : 0;
    half += kUnitsBatch << depth;
    for (; (batches >> depth) & 1; ++depth) carry = add(level[depth], carry);
    level[depth] = carry;
    batches += whole ? 2 : 1;
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
  const int64_t halves = params.units.whole + params.units.count;
  constexpr int64_t kLeastRun = 2 * kUnitsBatch;
  const int64_t runs =
      std::min(up_to_power((halves + kLeastRun - 1) / kLeastRun), int64_t{kMaxJoinRuns});
  const int64_t run = up_to_power((halves + runs - 1) / runs);
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
