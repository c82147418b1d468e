// The contract's w, by which values are multiplied, and where kernels that hold rows keep it.
#pragma once

#include "cuda/row_part.cuh"

namespace automodel::cuda {

// What is added to a weight to make it a gain; -0 changes no value, and no sign of a zero.
template <class A>
__device__ __forceinline__ A gain_offset(bool zero_centered_gamma) {
  return zero_centered_gamma ? A(1) : -A(0);
}

// The gains of a chunk's elements. Nothing is multiplied where there is no weight.
template <class A, class W>
struct ChunkGains {
  A gain[kSlots];

  ChunkGains() = default;
  __device__ __forceinline__ ChunkGains(const Chunk<W>& weight, A offset) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      gain[slot] = numerics::add(numerics::to_accumulate<A>(weight.get(slot)), offset);
    }
  }
  __device__ __forceinline__ A apply(A value, int slot) const {
    return numerics::mul(value, gain[slot]);
  }
};
template <class A>
struct ChunkGains<A, NoWeight> {
  ChunkGains() = default;
  __device__ __forceinline__ ChunkGains(const Chunk<NoWeight>&, A) {}
  __device__ __forceinline__ A apply(A value, int) const { return value; }
};

// The gains of a thread's part of a row, in A.
template <class A, class W, class Part>
struct HeldGains {
  ChunkGains<A, W> chunk[Part::kChunks];

  __device__ __forceinline__ HeldGains(const void* weight, bool zero_centered_gamma,
                                       const Part& part) {
    const A offset = gain_offset<A>(zero_centered_gamma);
#pragma unroll
    for (int k = 0; k < Part::kChunks; ++k) {
      chunk[k] = ChunkGains<A, W>(part.template load_weight<W>(weight, k), offset);
    }
  }
  __device__ __forceinline__ const ChunkGains<A, W>& get(int k) const { return chunk[k]; }
};

// The same kept as W, in fewer registers.
template <class A, class W, class Part>
struct PackedGains {
  Chunk<W> chunk[Part::kChunks];
  A offset;

  __device__ __forceinline__ PackedGains(const void* weight, bool zero_centered_gamma,
                                         const Part& part)
      : offset(gain_offset<A>(zero_centered_gamma)) {
#pragma unroll
    for (int k = 0; k < Part::kChunks; ++k) chunk[k] = part.template load_weight<W>(weight, k);
  }
  __device__ __forceinline__ ChunkGains<A, W> get(int k) {
    chunk[k].stay_packed();
    return {chunk[k], offset};
  }
};

// The same where registers have no room for them, for rows of whole warps: the first kStaged chunks
// are copied to the block's dynamic shared memory ahead of time, the others read when they are used.
// To be asked for in ascending order.
template <class A, class W, class Part, int kStaged>
struct LateGains {
  static constexpr int kBytes = kStaged * kSlots * Part::kBlockThreads * int{sizeof(W)};

  const W* weight;
  const Part& part;
  A offset;

  __device__ __forceinline__ LateGains(const void* weight, bool zero_centered_gamma,
                                       const Part& part)
      : weight(static_cast<const W*>(weight)),
        part(part),
        offset(gain_offset<A>(zero_centered_gamma)) {
    constexpr int kWord = 16 / sizeof(W);  // what a lane copies at once
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int k = 0; k < kStaged; ++k) {
      const int first = (k * part.threads + part.index - lane) * kSlots;  // of the warp's
#pragma unroll
      for (int word = 0; word < kSlots / kWord; ++word) {
        const int i = first + (word * kWarp + lane) * kWord;
        if (i < part.chunks * kSlots) copy(staged(k) + i, this->weight + i);
      }
    }
  }
  __device__ __forceinline__ ChunkGains<A, W> get(int k) const {
    Chunk<W> chunk;
    if (k < kStaged) {
      if (k == 0) wait();  // all lanes have this one
      part.load(chunk, staged(k), k);
    } else {
      part.load(chunk, weight, k);
    }
    return {chunk, offset};
  }

 private:
  // A base for chunk number k of this block's threads: element i of the weight is at staged(k) + i.
  __device__ __forceinline__ W* staged(int k) const {
    const int first = k * part.threads + part.index - static_cast<int>(threadIdx.x);
    return dynamic_shared<W>() + (k * Part::kBlockThreads - first) * kSlots;
  }
  static __device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
  }
  // By way of the L1 cache, for the next blocks copy the same.
  static __device__ __forceinline__ void copy(W* to, const W* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
  }
};

}  // namespace automodel::cuda
