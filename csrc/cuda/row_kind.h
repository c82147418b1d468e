// How rows are cut among threads, for the kernels that hold a row in registers or shared memory.
// They take rows of whole chunks that begin at multiples of 16 bytes. For the host; row_part.cuh is
// what a thread sees of it.
#pragma once

#include <type_traits>

#include "cuda/device_limits.h"
#include "numerics/spec.h"

namespace automodel::cuda {

constexpr int kWarp = 32;
constexpr int kSmallBlock = 256;  // threads; as many short rows side by side as fill it
constexpr int kLargeBlock = 512;
constexpr int kMaxCluster = 8;  // what a GPU with clusters can launch, if it is not cut smaller

// What a kernel is compiled for. Thread i of P along a row takes chunks i, i + P, i + 2P ...; with
// kVirtual = T / P, chunk number k of a thread belongs to its virtual thread k mod kVirtual.
template <int kChunks_, int kVirtual_, int kBlockThreads_, bool kSpread_>
struct RowKind {
  static constexpr int kChunks = kChunks_;
  static constexpr int kVirtual = kVirtual_;
  static constexpr int kBlockThreads = kBlockThreads_;
  static constexpr bool kSpread = kSpread_;  // over the blocks of a cluster
};

struct RowShape {
  int threads;  // of a block along a row
  int rows;     // side by side in a block
  int blocks;   // that share a row
};

// The whole chunks of a virtual thread, 1 to 4; more only where there are no more virtual threads.
inline int64_t chunks_of_virtual_thread(int64_t hidden) {
  const int threads = numerics::virtual_threads(hidden);
  return (numerics::chunks_in_row(hidden) + threads - 1) / threads;
}

// Calls f(RowKind, RowShape) for rows of fewer virtual threads than kLargeBlock: as many of them
// side by side as fill a block. False for longer ones.
template <class F>
bool visit_short_kind(int64_t hidden, F f) {
  const int threads = numerics::virtual_threads(hidden);
  if (threads >= kLargeBlock) return false;
  const RowShape shape{threads, kSmallBlock / threads, 1};
  const auto chunks = chunks_of_virtual_thread(hidden);
  if (chunks == 1) f(RowKind<1, 1, kSmallBlock, false>{}, shape);
  if (chunks == 2) f(RowKind<2, 1, kSmallBlock, false>{}, shape);
  if (chunks == 3) f(RowKind<3, 1, kSmallBlock, false>{}, shape);
  if (chunks == 4) f(RowKind<4, 1, kSmallBlock, false>{}, shape);
  return true;
}

// The same for longer rows, by blocks of kBlock threads. Rather than more blocks for a row a thread
// gets several virtual threads, as long as that is at most kMostChunks chunks; so where there are
// more blocks, twice as many virtual threads would be more chunks than that. False where that takes
// too many blocks, or one and kOneBlock says that there is no such row.
template <int kBlock, int kMostChunks, bool kOneBlock = true, class F>
bool visit_long_kind(int64_t hidden, const DeviceLimits& limits, F f) {
  const int threads = numerics::virtual_threads(hidden);
  const auto chunks = chunks_of_virtual_thread(hidden);
  int together = 1;
  while (threads > kBlock * together && 2 * together * chunks <= kMostChunks) together *= 2;
  const RowShape shape{kBlock, 1, threads / (kBlock * together)};
  if (chunks > 4 || shape.blocks > limits.largest_cluster) return false;
  if (!kOneBlock && shape.blocks == 1) return false;
  const auto visit = [&](auto kind_chunks, auto kind_together) {
    constexpr int kChunks = decltype(kind_chunks)::value;
    constexpr int kVirtual = decltype(kind_together)::value;
    if (chunks != kChunks || together != kVirtual) return;
    if constexpr (kOneBlock && (kVirtual == 1 || kVirtual * kChunks <= kMostChunks)) {
      using Whole = RowKind<kVirtual * kChunks, kVirtual, kBlock, false>;
      if (shape.blocks == 1) f(Whole{}, shape);
    }
    if constexpr (2 * kVirtual * kChunks > kMostChunks &&
                  (kVirtual == 1 || kVirtual * kChunks <= kMostChunks)) {
      using Spread = RowKind<kVirtual * kChunks, kVirtual, kBlock, true>;
      if (shape.blocks > 1) f(Spread{}, shape);
    }
  };
  const auto visit_chunks = [&](auto kind_together) {
    visit(std::integral_constant<int, 2>{}, kind_together);
    visit(std::integral_constant<int, 3>{}, kind_together);
    visit(std::integral_constant<int, 4>{}, kind_together);
  };
  visit_chunks(std::integral_constant<int, 1>{});
  visit_chunks(std::integral_constant<int, 2>{});
  visit_chunks(std::integral_constant<int, 4>{});
  return true;
}

}  // namespace automodel::cuda
