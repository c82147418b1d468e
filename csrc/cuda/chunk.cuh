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

// 8 bytes, or a multiple of 16, at once.
template <int kCount>
__device__ __forceinline__ void copy_words(uint32_t* to, const uint32_t* from) {
  if constexpr (kCount == 2) {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    }
  }
}

template <class X>
struct Chunk {
  static constexpr int kWords = sizeof(X) * kSlots / sizeof(uint32_t);
  static constexpr int kPieces = kWords / 4;  // of 16 bytes
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

  __device__ __forceinline__ void set_piece(int piece, uint4 words) {
    word[4 * piece] = words.x;
    word[4 * piece + 1] = words.y;
    word[4 * piece + 2] = words.z;
    word[4 * piece + 3] = words.w;
  }

  __device__ __forceinline__ uint4 piece(int piece) const {
    return make_uint4(word[4 * piece], word[4 * piece + 1], word[4 * piece + 2],
                      word[4 * piece + 3]);
  }

  // Part p of kParts of the chunk, from or to memory that is aligned to its size or 16 bytes.
  template <int kParts>
  __device__ __forceinline__ void load_words(int p, const X* from) {
    constexpr int kCount = kWords / kParts;
    copy_words<kCount>(word + p * kCount, reinterpret_cast<const uint32_t*>(from));
  }
  template <int kParts>
  __device__ __forceinline__ void store_words(int p, X* to) const {
    constexpr int kCount = kWords / kParts;
    copy_words<kCount>(reinterpret_cast<uint32_t*>(to), word + p * kCount);
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

// The elements, each rounded once.
template <class X, class A>
__device__ __forceinline__ Chunk<X> round_chunk(const A (&values)[kSlots]) {
  Chunk<X> chunk;
  if constexpr (std::is_same_v<X, numerics::BFloat16> && std::is_same_v<A, float>) {
#pragma unroll
    for (int i = 0; i < kSlots / 2; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
      chunk.word[i] = numerics::bit_cast<uint32_t>(pair);
    }
  } else if constexpr (std::is_same_v<X, numerics::Float16> && std::is_same_v<A, float>) {
#pragma unroll
    for (int i = 0; i < kSlots / 2; ++i) {
      const __half2 pair = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
      chunk.word[i] = numerics::bit_cast<uint32_t>(pair);
    }
  } else {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      chunk.set(slot, numerics::round_to<X>(values[slot]));
    }
  }
  return chunk;
}

template <class A, class X>
__device__ __forceinline__ void add_chunk(A (&values)[kSlots], const Chunk<X>& chunk) {
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    values[slot] = numerics::add(values[slot], numerics::to_accumulate<A>(chunk.get(slot)));
  }
}

// The rounded sum of two chunks.
template <class X>
__device__ __forceinline__ Chunk<X> add_chunks(const Chunk<X>& a, const Chunk<X>& b) {
  using A = numerics::Accumulate<X>;
  A sum[kSlots];
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    sum[slot] = numerics::add(numerics::to_accumulate<A>(a.get(slot)),
                              numerics::to_accumulate<A>(b.get(slot)));
  }
  return round_chunk<X>(sum);
}

template <class X>
__device__ __forceinline__ Chunk<X> load_whole_chunk(const X* row, int64_t chunk) {
  const uint4* const pieces = reinterpret_cast<const uint4*>(row + chunk * kSlots);
  Chunk<X> result;
#pragma unroll
  for (int i = 0; i < Chunk<X>::kPieces; ++i) result.set_piece(i, pieces[i]);
  return result;
}

template <class X>
__device__ __forceinline__ void store_whole_chunk(X* row, int64_t chunk, const Chunk<X>& value) {
  uint4* const pieces = reinterpret_cast<uint4*>(row + chunk * kSlots);
#pragma unroll
  for (int i = 0; i < Chunk<X>::kPieces; ++i) pieces[i] = value.piece(i);
}

// The same for any row of `hidden` elements; elements past its end are +0 and are not stored.
template <class X>
__device__ __forceinline__ Chunk<X> load_chunk(const X* row, int64_t chunk, int64_t hidden,
                                               bool aligned) {
  const int64_t begin = chunk * kSlots;
  if (aligned && begin + kSlots <= hidden) return load_whole_chunk(row, chunk);
  Chunk<X> result;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    result.set(slot, begin + slot < hidden ? row[begin + slot] : X{});
  }
  return result;
}

template <class X>
__device__ __forceinline__ void store_chunk(X* row, const Chunk<X>& value, int64_t chunk,
                                            int64_t hidden, bool aligned) {
  const int64_t begin = chunk * kSlots;
  if (aligned && begin + kSlots <= hidden) return store_whole_chunk(row, chunk, value);
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    if (begin + slot < hidden) row[begin + slot] = value.get(slot);
  }
}

template <class X>
__device__ __forceinline__ const X* row_of(const void* data, const numerics::RowLayout& layout,
                                           int64_t row) {
  return static_cast<const X*>(data) + numerics::row_offset(layout, row);
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

}  // namespace automodel::cuda
