// The contract's row_sum in a block: slots, then lanes, then warps. A warp holds one group of
// virtual threads, or two groups of 16 where T is 16.
#pragma once

#include <algorithm>

#include "cuda/chunk.cuh"
#include "cuda/row_part.cuh"

namespace automodel::cuda {

using numerics::kGroup;

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxBlockThreads = 1024;
static_assert(kWarp == kGroup, "a warp holds a group of virtual threads");

template <class A>
__device__ __forceinline__ A join_slots(const A (&s)[kSlots]) {
  using numerics::add;
  return add(add(add(s[0], s[4]), add(s[2], s[6])), add(add(s[1], s[5]), add(s[3], s[7])));
}

// The same for virtual threads that lanes share as RowPart says. Of a pair of lanes, the even one
// gets the first virtual thread's sum and the odd one the second's.
template <class Part, class A>
__device__ __forceinline__ A join_slots(const A (&s)[kSlots]) {
  if constexpr (Part::kPieces == 1) {
    return join_slots(s);
  } else {
    static_assert(Part::kPieces == 2, "a lane has half of a chunk");
    using numerics::add;
    const bool odd = threadIdx.x % 2 != 0;
    A half[kSlots / 2];  // slots i and i + 4 of the lane's virtual thread
#pragma unroll
    for (int i = 0; i < kSlots / 2; ++i) {
      const A own = odd ? s[kSlots / 2 + i] : s[i];
      const A other = odd ? s[i] : s[kSlots / 2 + i];
      half[i] = add(own, __shfl_xor_sync(kAllLanes, other, 1));
    }
    return add(add(half[0], half[2]), add(half[1], half[3]));
  }
}

// Every lane gets the sum over its `width` neighbours, by halves of the virtual threads that they
// hold: lane i the i-th, or with two pieces lane 2i the i-th and lane 2i + 1 the one half a width
// further on.
template <int kPieces = 1, class A>
__device__ __forceinline__ A join_lanes(A value, int width) {
  if constexpr (kPieces == 2) {
    value = numerics::add(value, __shfl_xor_sync(kAllLanes, value, 1));
  }
#pragma unroll
  for (int half = kWarp / 2; half >= kPieces; half /= 2) {
    if (half < width) value = numerics::add(value, __shfl_xor_sync(kAllLanes, value, half));
  }
  return value;
}

// The sum of kGroups groups' sums, by halves, by this thread alone.
template <int kGroups, class A>
__device__ __forceinline__ A join_few_groups(const A* sums) {
  A value[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) value[i] = sums[i];
#pragma unroll
  for (int half = kGroups / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) value[i] = numerics::add(value[i], value[i + half]);
  }
  return value[0];
}

// Every lane gets the sum of the groups' sums, by halves.
template <class A>
__device__ __forceinline__ A join_groups(const A* sums, int groups) {
  static_assert(numerics::kMaxGroups == 4 * kWarp, "at most four sums a lane");
  using numerics::add;
  if (groups == 2) return join_few_groups<2>(sums);
  if (groups == 4) return join_few_groups<4>(sums);
  if (groups == 8) return join_few_groups<8>(sums);
  const int lane = threadIdx.x % kWarp;
  const int width = min(groups, kWarp);
  A value = sums[lane % width];
  if (groups == 2 * kWarp) value = add(value, sums[lane + kWarp]);
  if (groups == 4 * kWarp) {
    value =
        add(add(value, sums[lane + 2 * kWarp]), add(sums[lane + kWarp], sums[lane + 3 * kWarp]));
  }
  return join_lanes(value, width);
}

// Where the warps of a block's rows, or of a cluster's row, leave their sums: one of these for rows
// that are summed together, and another for the next ones, so that one barrier is enough.
template <class A, int kRows>
struct alignas(16) RowSums {
  A of[kRows][numerics::kMaxGroups];
  uint64_t arrived;  // an mbarrier, for a cluster
};

#if defined(AUTOMODEL_HAS_CLUSTERS)
__device__ __forceinline__ uint32_t address_in_block(uint32_t address, int block) {
  uint32_t result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(block));
  return result;
}

// Sends a value to the same place in another block of the cluster and counts its bytes there. No
// fence, so nobody waits for earlier writes to global memory.
__device__ __forceinline__ void send(const float* to, float value, const uint64_t* arrived,
                                     int block) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   address_in_block(shared_address(to), block)),
               "r"(__float_as_uint(value)), "r"(address_in_block(shared_address(arrived), block))
               : "memory");
}

__device__ __forceinline__ void expect_bytes(uint64_t* arrived, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrived)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void wait_bytes(uint64_t* arrived, unsigned phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(arrived)),
      "r"(phase)
      : "memory");
}
#endif

// To be called once before the first send_sums.
template <class Kind, class A, int kRows, int kCount>
__device__ __forceinline__ void begin_sums(RowSums<A, kRows> (&sums)[kCount]) {
#if defined(AUTOMODEL_HAS_CLUSTERS)
  if constexpr (Kind::kSpread) {
    if (linear_thread() == 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        asm volatile(
            "mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&sums[i].arrived)));
      }
    }
    cooperative_groups::this_cluster().sync();  // no block sends before the others have begun
  }
#endif
}

// The first half of row_sum: from the joined slots of each thread's virtual threads to the sums of
// groups, for the other warps of the row to read.
template <class X, class Kind, class A, int kRows>
__device__ __forceinline__ void send_sums(A (&value)[kRows][Kind::kVirtual],
                                          const RowPart<X, Kind>& part, RowSums<A, kRows>& sums) {
  constexpr int kPieces = RowPart<X, Kind>::kPieces;
  const int width = part.threads >= kWarp ? kWarp : kWarp / 2;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int v = 0; v < Kind::kVirtual; ++v) value[r][v] = join_lanes<kPieces>(value[r][v], width);
  }
  const int warps = part.threads / kWarp;
  const int groups = Kind::kVirtual * warps;
  if (groups <= 1) return;
  const int lane = threadIdx.x % kWarp;
  A* const own = sums.of[0] + (Kind::kSpread ? 0 : threadIdx.y * groups) + part.index / kWarp;
  const auto for_each_sum = [&](const auto& body) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int v = 0; v < Kind::kVirtual; ++v) {
        body(own + r * numerics::kMaxGroups + v * warps, value[r][v]);
      }
    }
  };
#if defined(AUTOMODEL_HAS_CLUSTERS)
  if constexpr (Kind::kSpread) {
    if (threadIdx.x == 0) {
      expect_bytes(&sums.arrived, kRows * groups * static_cast<int>(sizeof(A)));
    }
    if (lane < part.blocks) {
      for_each_sum([&](A* place, A sum) { send(place, sum, &sums.arrived, lane); });
    }
  }
#endif
  if constexpr (!Kind::kSpread) {
    if (lane == 0) for_each_sum([&](A* place, A sum) { *place = sum; });
  }
}

// The second half: row_sum in the first element of each row's `value`, as send_sums has left it.
// `phase` alternates from 0 each time that the same sums are used again. A wait that acquires for
// the block alone is enough: only shared memory passes between the blocks.
template <class X, class Kind, class A, int kRows>
__device__ __forceinline__ void receive_sums(A (&value)[kRows][Kind::kVirtual],
                                             const RowPart<X, Kind>& part, RowSums<A, kRows>& sums,
                                             unsigned phase) {
  const int groups = Kind::kVirtual * (part.threads / kWarp);
  if (groups > 1) {
#if defined(AUTOMODEL_HAS_CLUSTERS)
    if constexpr (Kind::kSpread) wait_bytes(&sums.arrived, phase);
#endif
    if constexpr (!Kind::kSpread) {
      // Only the threads of these rows; barrier 0 is that of __syncthreads.
      asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(part.threads) : "memory");
    }
    const A* const row_sums = sums.of[0] + (Kind::kSpread ? 0 : threadIdx.y * groups);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      value[r][0] = join_groups(row_sums + r * numerics::kMaxGroups, groups);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) value[r][0] = numerics::finish_sum(value[r][0]);
}

// row_sum of a row of any length by a block of (threads, rows), at least a warp a row: a warp takes
// whole groups in turn. Every thread of the block is to come here, and a block that goes on to
// other rows needs a barrier in between. accumulate(slots, chunk) adds a chunk's terms to the
// thread's slots.
template <class A, class Accumulate>
__device__ __forceinline__ A long_row_sum(int64_t hidden, const Accumulate& accumulate) {
  alignas(16) __shared__ A sums[numerics::kMaxGroups];
  const int threads = numerics::virtual_threads(hidden);
  const int64_t chunks = numerics::chunks_in_row(hidden);
  const int groups = max(threads / kGroup, 1);
  A* const row_sums = sums + threadIdx.y * groups;  // more rows than one are as wide as the block
  const int lane = threadIdx.x % kWarp;
  for (int group = threadIdx.x / kWarp; group < groups; group += blockDim.x / kWarp) {
    A slots[kSlots] = {};
    if (lane < threads) {
      for (int64_t chunk = group * kGroup + lane; chunk < chunks; chunk += threads) {
        accumulate(slots, chunk);
      }
    }
    const A value = join_lanes(join_slots(slots), min(threads, kWarp));
    if (lane == 0) row_sums[group] = value;
  }
  __syncthreads();
  return numerics::finish_sum(join_groups(row_sums, groups));
}

// Blocks for long rows, which they take in turn.
inline unsigned long_row_blocks(int64_t rows) {
  constexpr int64_t kMaxGrid = 0x40000000;  // a kernel may have others beside them
  return static_cast<unsigned>(rows < kMaxGrid ? rows : kMaxGrid);
}

// Threads of a block for a long row, at most `most`.
inline int long_row_threads(int64_t hidden, int most) {
  return std::clamp(numerics::virtual_threads(hidden), kWarp, most);
}

}  // namespace automodel::cuda
