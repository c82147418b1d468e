// The numerics contract, version 1: every choice that decides a bit of y, sum, rstd, grad_x
// or grad_weight and that the formula leaves open. docs/numerics.md says the same in prose.
//
// Types. A is float for x in {bfloat16, float16, float32} and double for float64 x. All arithmetic
// is IEEE 754 in A, round to nearest even, subnormals kept. Products are rounded on their own
// except in fma. Division and square root are correctly rounded.
//
//   w      = A(weight), A(weight) + 1 when zero_centered_gamma, absent without weight
//   rstd   = 1 / sqrt(row_sum(x, x) / A(N) + A(eps))
//   xhat   = x * rstd
//   y      = round_to<X>(xhat * w)                               xhat without weight
//   t      = grad_y * w                                          grad_y without weight
//   grad_x = round_to<X>(rstd * fma(-xhat, row_sum(t, xhat) / A(N), t))
//   grad_weight = round_to<W>(column_sum(grad_y, xhat))
//
// With a residual the sum is normalised: it takes the place of x above, and what it adds up has one
// gradient.
//
//   sum    = round_to<X>(x + residual)
//   grad_x = round_to<X>(rstd * fma(-xhat, row_sum(t, xhat) / A(N), t) + grad_sum)
//
// row_sum(a, b). A chunk is kSlots consecutive elements. Chunk c belongs to virtual thread c mod T.
// Thread and slot accumulate acc = fma(a, b, acc) from +0 over their elements in ascending order.
// A thread joins its slots as ((0+4)+(2+6))+((1+5)+(3+7)). Threads join in groups of kGroup
// consecutive ones by halves (v joins v+16, then v+8, v+4, v+2, v+1), groups join by halves, and
// +0 is added to the total. T < kGroup is one group that starts at its own half.
//
// column_sum(a, b). kLeafRows consecutive rows are a leaf: acc = fma(a, b, acc) from +0 in row
// order. Leaves are joined by an aligned binary tree (leaf 2i + leaf 2i+1, and so on), and +0 is
// added to the total.
//
// Adding +0 at the end turns a total of -0 into +0. Zeros that pad a sum can change nothing but the
// sign of a zero, so padding a row, a group or a tree with +0 terms never changes a bit.
#pragma once

#include <cstdint>

#include "numerics/macros.h"

namespace automodel::numerics {

constexpr int kContractVersion = 1;

constexpr int kSlots = 8;
constexpr int kGroup = 32;
constexpr int kLeafRows = 8;

constexpr int kMinVirtualThreads = 16;
constexpr int kMaxVirtualThreads = 4096;
constexpr int kMaxGroups = kMaxVirtualThreads / kGroup;

AUTOMODEL_NUMERICS constexpr int64_t chunks_in_row(int64_t hidden) {
  return (hidden + kSlots - 1) / kSlots;
}

// T: the largest power of two that leaves each virtual thread two whole chunks, between the limits.
AUTOMODEL_NUMERICS constexpr int virtual_threads(int64_t hidden) {
  int threads = kMinVirtualThreads;
  while (threads < kMaxVirtualThreads && int64_t{threads} * 4 * kSlots <= hidden) threads *= 2;
  return threads;
}

AUTOMODEL_NUMERICS constexpr int64_t leaves_in(int64_t rows) {
  return (rows + kLeafRows - 1) / kLeafRows;
}

// The aligned binary tree as a binary counter. After leaves 0 .. index-1, level l holds a finished
// subtree of 2^l leaves exactly where bit l of index is set. Leaf number index is joined with
// levels 0 .. d-1, each as level + carry, and the carry is kept in level d = tree_depth(index).
AUTOMODEL_NUMERICS constexpr int tree_depth(int64_t index) {
  int depth = 0;
  while ((index >> depth) & 1) ++depth;
  return depth;
}

// The number of levels that a counter over `leaves` leaves uses.
AUTOMODEL_NUMERICS constexpr int tree_levels(int64_t leaves) {
  int levels = 0;
  while (leaves >> levels) ++levels;
  return levels;
}

}  // namespace automodel::numerics
