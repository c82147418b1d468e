// The shape of the contract's trees.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "numerics/arithmetic.h"
#include "numerics/spec.h"
#include "numerics/types.h"

namespace automodel::numerics {
namespace {

TEST(VirtualThreads, AreAPowerOfTwoBetweenTheLimits) {
  for (int64_t hidden = 1; hidden < 300000; ++hidden) {
    const int threads = virtual_threads(hidden);
    ASSERT_EQ(threads & (threads - 1), 0) << hidden;
    ASSERT_GE(threads, kMinVirtualThreads) << hidden;
    ASSERT_LE(threads, kMaxVirtualThreads) << hidden;
  }
}

TEST(VirtualThreads, AreTheMostThatLeaveEachTwoWholeChunks) {
  for (int64_t hidden = 1; hidden < 300000; ++hidden) {
    const int64_t threads = virtual_threads(hidden);
    const int64_t two_chunks = 2 * kSlots;
    ASSERT_TRUE(threads == kMinVirtualThreads || threads * two_chunks <= hidden) << hidden;
    ASSERT_TRUE(threads == kMaxVirtualThreads || 2 * threads * two_chunks > hidden) << hidden;
  }
}

// The table in docs/numerics.md.
TEST(VirtualThreads, OfModelWidths) {
  constexpr struct {
    int64_t hidden;
    int threads;
    int64_t chain;  // the most elements of a thread and slot
  } kTable[] = {{1, 16, 1},       {64, 16, 1},        {128, 16, 1},     {511, 16, 4},
                {512, 32, 2},     {768, 32, 3},       {1024, 64, 2},    {2048, 128, 2},
                {2688, 128, 3},   {3072, 128, 3},     {4095, 128, 4},   {4096, 256, 2},
                {5120, 256, 3},   {7168, 256, 4},     {8192, 512, 2},   {12288, 512, 3},
                {16384, 1024, 2}, {18432, 1024, 3},   {32768, 2048, 2}, {65535, 2048, 4},
                {65536, 4096, 2}, {1048576, 4096, 32}};
  for (const auto& row : kTable) {
    EXPECT_EQ(virtual_threads(row.hidden), row.threads) << row.hidden;
    EXPECT_EQ((chunks_in_row(row.hidden) + row.threads - 1) / row.threads, row.chain) << row.hidden;
  }
}

TEST(Leaves, CoverTheRows) {
  EXPECT_EQ(leaves_in(0), 0);
  EXPECT_EQ(leaves_in(1), 1);
  EXPECT_EQ(leaves_in(kLeafRows), 1);
  EXPECT_EQ(leaves_in(kLeafRows + 1), 2);
  EXPECT_EQ(leaves_in(int64_t{1} << 40), (int64_t{1} << 40) / kLeafRows);
}

TEST(TreeDepth, CountsTrailingOnes) {
  for (int64_t index = 0; index < 4096; ++index) {
    int ones = 0;
    for (int64_t rest = index; rest % 2 == 1; rest /= 2) ++ones;
    ASSERT_EQ(tree_depth(index), ones) << index;
  }
  EXPECT_EQ(tree_depth((int64_t{1} << 40) - 1), 40);
}

TEST(TreeLevels, AreThoseThatACounterReaches) {
  for (int64_t leaves = 0; leaves < 4096; ++leaves) {
    int levels = 0;
    for (int64_t index = 0; index < leaves; ++index) {
      if (tree_depth(index) + 1 > levels) levels = tree_depth(index) + 1;
    }
    ASSERT_EQ(tree_levels(leaves), levels) << leaves;
    if (leaves > 200) leaves += 97;
  }
}

using Sums = std::vector<float>;

// The contract's words: leaves are padded with +0 to a power of two and joined by neighbours.
float padded_tree(Sums sums) {
  if (sums.empty()) return 0;
  while (sums.size() & (sums.size() - 1)) sums.push_back(0);
  for (; sums.size() > 1; sums.resize(sums.size() / 2)) {
    for (size_t i = 0; i < sums.size() / 2; ++i) sums[i] = add(sums[2 * i], sums[2 * i + 1]);
  }
  return sums[0];
}

// What the kernels do.
float counter_tree(const Sums& sums) {
  std::vector<float> levels(static_cast<size_t>(tree_levels(static_cast<int64_t>(sums.size()))));
  for (size_t index = 0; index < sums.size(); ++index) {
    const int depth = tree_depth(static_cast<int64_t>(index));
    float carry = sums[index];
    for (int level = 0; level < depth; ++level) carry = add(levels[level], carry);
    levels[depth] = carry;
  }
  float total = 0;
  for (size_t level = 0; level < levels.size(); ++level) {
    if ((sums.size() >> level) & 1) total = add(levels[level], total);
  }
  return total;
}

// Values of all sizes, many of them zeros of either sign, so that sums round and cancel.
Sums random_leaves(size_t count) {
  std::mt19937 random(static_cast<uint32_t>(count));
  Sums sums(count);
  for (float& sum : sums) {
    const uint32_t bits = random();
    if (bits % 5 == 0) {
      sum = bits & 32 ? -0.0f : 0.0f;
    } else {
      sum = static_cast<float>(static_cast<int32_t>(random())) *
            bit_cast<float>((96 + bits % 30) << 23);
    }
  }
  return sums;
}

uint32_t finished_bits(float total) { return bit_cast<uint32_t>(finish_sum(total)); }

TEST(Tree, CounterIsThePaddedTree) {
  for (size_t count = 0; count < 300; ++count) {
    const Sums leaves = random_leaves(count);
    ASSERT_EQ(finished_bits(counter_tree(leaves)), finished_bits(padded_tree(leaves))) << count;
  }
}

TEST(Tree, UnitsOfAnyPowerOfTwoAreSubtrees) {
  for (size_t count = 1; count < 300; count += 7) {
    const Sums leaves = random_leaves(count);
    for (size_t unit = 1; unit <= 512; unit *= 2) {
      Sums units;
      for (size_t begin = 0; begin < count; begin += unit) {
        const auto first = leaves.begin() + static_cast<std::ptrdiff_t>(begin);
        units.push_back(counter_tree(
            Sums(first, first + static_cast<std::ptrdiff_t>(std::min(unit, count - begin)))));
      }
      ASSERT_EQ(finished_bits(counter_tree(units)), finished_bits(padded_tree(leaves)))
          << count << " leaves, units of " << unit;
    }
  }
}

TEST(Tree, PaddingChangesNothing) {
  for (size_t count = 0; count < 100; ++count) {
    Sums leaves = random_leaves(count);
    const uint32_t bits = finished_bits(counter_tree(leaves));
    for (int padding = 0; padding < 40; ++padding) {
      leaves.push_back(0);
      ASSERT_EQ(finished_bits(counter_tree(leaves)), bits) << count << " and " << padding + 1;
    }
  }
}

TEST(Tree, ATotalOfMinusZeroBecomesPlusZero) {
  EXPECT_EQ(finished_bits(counter_tree({-0.0f, -0.0f})), 0u);
  EXPECT_EQ(finished_bits(padded_tree({-0.0f, -0.0f})), 0u);
}

}  // namespace
}  // namespace automodel::numerics
