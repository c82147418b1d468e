// A chunk of the contract in registers: kSlots elements as they are in memory, and in A.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "numerics/arithmetic.h"
#include "numerics/params.h"
#include "numerics/spec.h"
#include "numerics/types.h"

namespace automodel::cuda {

using numerics::kSlots;
using numerics::NoWeight;

template <class X>
struct Chunk {
  static constexpr int kWords = sizeof(X) * kSlots / sizeof(uint32_t);
  uint32_t word[kWords];

  __device__ __forceinline__ X get(int slot) const {
    if constexpr (sizeof(X) == 2) {
      return {static_cast<uint16_t>(word[slot / 2] >> (slot % 2 * 16))};
    } else if constexpr (sizeof(X) == 4) {
      return numerics::bit_cast<X>(word[slot]);
    } else {
      return numerics::bit_cast<X>(word[2 * slot] | uint64_t{word[2 * slot + 1]} << 32);
    }
  }

  // To be called for every slot, in ascending order.
  __device__ __forceinline__ void set(int slot, X value) {
    if constexpr (sizeof(X) == 2) {
      word[slot / 2] = slot % 2 == 0 ? value.bits : word[slot / 2] | uint32_t{value.bits} << 16;
    } else if constexpr (sizeof(X) == 4) {
      word[slot] = numerics::bit_cast<uint32_t>(value);
    } else {
      const auto bits = numerics::bit_cast<uint64_t>(value);
      word[2 * slot] = static_cast<uint32_t>(bits);
      word[2 * slot + 1] = static_cast<uint32_t>(bits >> 32);
    }
  }

  // Makes the compiler convert the elements again after this point, rather than keep both forms of
  // them in registers.
  __device__ __forceinline__ void stay_packed() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) asm volatile("" : "+r"(word[i]));
  }
};
template <>
struct Chunk<NoWeight> {
  __device__ __forceinline__ void stay_packed() {}
};

// Whether the chunks of every row begin at a multiple of 16 bytes.
template <class X>
bool chunks_are_aligned(const void* data, int64_t row_stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_stride * int64_t{sizeof(X)} % 16 == 0;
}

template <class X>
bool chunks_are_aligned(const void* data, const numerics::RowLayout& layout) {
  bool aligned = true;
  for (int dim = 0; dim < layout.dims; ++dim) {
    aligned = aligned && chunks_are_aligned<X>(data, layout.strides[dim]);
  }
  return aligned;
}

// Chunk `chunk` of a row of `hidden` elements; elements past the end are +0.
template <class X>
__device__ __forceinline__ Chunk<X> load_chunk(const X* row, int64_t chunk, int64_t hidden,
                                               bool aligned) {
  Chunk<X> result;
  const int64_t begin = chunk * kSlots;
  if (aligned && begin + kSlots <= hidden) {
#pragma unroll
    for (int i = 0; i < Chunk<X>::kWords; i += 4) {
      const uint4 words =
          *reinterpret_cast<const uint4*>(reinterpret_cast<const uint32_t*>(row + begin) + i);
      result.word[i] = words.x;
      result.word[i + 1] = words.y;
      result.word[i + 2] = words.z;
      result.word[i + 3] = words.w;
    }
  } else {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      result.set(slot, begin + slot < hidden ? row[begin + slot] : X{});
    }
  }
  return result;
}

template <class X>
__device__ __forceinline__ void store_chunk(X* row, const Chunk<X>& value, int64_t chunk,
                                            int64_t hidden, bool aligned) {
  const int64_t begin = chunk * kSlots;
  if (aligned && begin + kSlots <= hidden) {
#pragma unroll
    for (int i = 0; i < Chunk<X>::kWords; i += 4) {
      *reinterpret_cast<uint4*>(reinterpret_cast<uint32_t*>(row + begin) + i) =
          make_uint4(value.word[i], value.word[i + 1], value.word[i + 2], value.word[i + 3]);
    }
  } else {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      if (begin + slot < hidden) row[begin + slot] = value.get(slot);
    }
  }
}

// The weight: nothing is read and nothing multiplied where there is none.
template <class W>
__device__ __forceinline__ Chunk<W> load_weight(const void* weight, int64_t chunk, int64_t hidden,
                                                bool aligned) {
  if constexpr (std::is_same_v<W, NoWeight>) {
    return {};
  } else {
    return load_chunk(static_cast<const W*>(weight), chunk, hidden, aligned);
  }
}

template <class A, class W>
__device__ __forceinline__ A apply_gain(A value, const Chunk<W>& weight, int slot,
                                        bool zero_centered) {
  if constexpr (std::is_same_v<W, NoWeight>) {
    return value;
  } else {
    const A w = numerics::to_accumulate<A>(weight.get(slot));
    return numerics::mul(value, zero_centered ? numerics::add(w, A(1)) : w);
  }
}

}  // namespace automodel::cuda
