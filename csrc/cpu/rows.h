// The kernels over rows, written once. Included for each instruction set, inside an anonymous
// namespace (level.h says why).

template <class A>
VEC_INLINE A join_by_halves(A* values, int count) {
  for (int half = count / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) values[i] = values[i] + values[i + half];
  }
  return values[0];
}

// The sums of kLanes virtual threads whose first chunks begin at element i. accumulate(acc, extent,
// i) returns fma(a, b, acc) for the block at i, with +0 for both factors past the end of the row.
template <class X, class Accumulate>
VEC_INLINE Vec<numerics::Accumulate<X>> thread_sums(int64_t i, int64_t stride, int64_t hidden,
                                                    const Accumulate& accumulate) {
  constexpr int64_t kSize = Block<X>::kSize;
  Block<X> acc[kChunkBlocks] = {};
  for (; i + kChunkBlocks * kSize <= hidden; i += stride) {
#pragma GCC unroll 4
    for (int j = 0; j < kChunkBlocks; ++j) acc[j] = accumulate(acc[j], Whole{}, i + j * kSize);
  }
#pragma GCC unroll 4
  for (int j = 0; j < kChunkBlocks; ++j, i += kSize) {
    if (i + kSize <= hidden) {
      acc[j] = accumulate(acc[j], Whole{}, i);
    } else if (i < hidden) {
      acc[j] = accumulate(acc[j], hidden - i, i);
    }
  }
  return join_slots<X>(acc);
}

// Rows that are done together, so that they share their gains and the last joins of their sums.
constexpr int kMaxTogether = 16;
static_assert(kLeafRows <= kMaxTogether, "a leaf is done together");

// The contract's row_sum of `count` rows; accumulate(r) is what thread_sums asks for, of row r.
template <class X, class Accumulate>
VEC_INLINE void row_sums(int count, int64_t hidden, const Accumulate& accumulate,
                         numerics::Accumulate<X>* totals) {
  using A = numerics::Accumulate<X>;
  static_assert(numerics::kMinVirtualThreads % kLanes<A> == 0, "a part of a group is whole");
  const int threads = numerics::virtual_threads(hidden);
  const int parts = (threads < kGroup ? threads : kGroup) / kLanes<A>;
  const int groups = threads / (parts * kLanes<A>);
  const int64_t stride = int64_t{threads} * kSlots;
  Vec<A> waiting[kLanes<A>];  // groups whose lanes are still to be joined, of any row
  A group_sums[kMaxTogether * numerics::kMaxGroups];
  int joined = 0, waits = 0;
  for (int r = 0; r < count; ++r) {
    for (int group = 0; group < groups; ++group) {
      Vec<A> sums[kGroup / kLanes<A>];
      for (int part = 0; part < parts; ++part) {
        const int64_t first = (int64_t{group} * parts + part) * kLanes<A> * kSlots;
        sums[part] = thread_sums<X>(first, stride, hidden, accumulate(r));
      }
      for (int half = parts / 2; half > 0; half /= 2) {
        for (int part = 0; part < half; ++part) sums[part] = sums[part] + sums[part + half];
      }
      waiting[waits++] = sums[0];
      if (waits < kLanes<A> && (r + 1 < count || group + 1 < groups)) continue;
      for (int i = waits; i < kLanes<A>; ++i) waiting[i] = sums[0];  // whatever it is
      store_vector<A>(group_sums + joined, join_lanes<kLanes<A>, A>(waiting));
      joined += waits;
      waits = 0;
    }
  }
  for (int r = 0; r < count; ++r) {
    totals[r] = numerics::finish_sum(join_by_halves(group_sums + r * groups, groups));
  }
}

// The gain w of the formula: A(weight), or A(weight) + 1. There is no product without weight.
template <class W>
struct Gain {
  const W* weight;
  bool zero_centered;
};

template <class X, class W, class Extent>
VEC_INLINE Block<X> gain_at(const Gain<W>& gain, Extent extent, int64_t i) {
  if constexpr (std::is_same_v<W, NoWeight>) {
    return Block<X>{};
  } else {
    const Block<X> w = load<X>(gain.weight + i, extent);
    return gain.zero_centered ? w + all<X>(1) : w;
  }
}
template <class W, class X>
VEC_INLINE Block<X> apply_gain(const Block<X>& w, const Block<X>& value) {
  if constexpr (std::is_same_v<W, NoWeight>) return value;
  return value * w;
}

VEC_INLINE int64_t earlier(int64_t row, int64_t other) { return row < other ? row : other; }

template <class X>
VEC_INLINE const X* row_of(const void* tensor, const numerics::RowLayout& layout, int64_t row) {
  return static_cast<const X*>(tensor) + numerics::row_offset(layout, row);
}

template <class X>
VEC_INLINE void add_row(const X* x, const X* residual, X* sum, int64_t hidden) {
  for_each_block<X>(0, hidden, [&](auto extent, int64_t i) {
    store(sum + i, load<X>(x + i, extent) + load<X>(residual + i, extent), extent);
  });
}

// At most 4 KiB of them: a load whose address agrees with that of a recent store modulo 4096 waits
// for the store.
template <class X>
int rows_together(int64_t hidden) {
  constexpr int64_t kBytes = 4096;
  const int64_t rows = kBytes / (hidden * static_cast<int64_t>(sizeof(X)));
  return rows < 1 ? 1 : rows > kMaxTogether ? kMaxTogether : static_cast<int>(rows);
}

template <class X, class W>
void forward_rows(const ForwardParams& params, int64_t begin, int64_t end) {
  using A = numerics::Accumulate<X>;
  constexpr int64_t kSize = Block<X>::kSize;
  const Gain<W> gain{static_cast<const W*>(params.weight), params.zero_centered_gamma};
  const A eps = static_cast<A>(params.eps);
  const int64_t hidden = params.hidden;
  const int together = rows_together<X>(hidden);
  for (int64_t row = begin; row < end; row += together) {
    const int count = static_cast<int>(earlier(row + together, end) - row);
    const X* x[kMaxTogether];
    const X* next[kMaxTogether];  // is fetched while y is computed
    for (int r = 0; r < count; ++r) {
      x[r] = row_of<X>(params.x, params.x_layout, row + r);
      next[r] = row_of<X>(params.x, params.x_layout, earlier(row + count + r, end - 1));
      if (params.residual == nullptr) continue;
      X* sum = static_cast<X*>(params.sum) + (row + r) * hidden;
      add_row(x[r], row_of<X>(params.residual, params.residual_layout, row + r), sum, hidden);
      x[r] = sum;
    }
    A rstd[kMaxTogether];
    row_sums<X>(
        count, hidden,
        [&](int r) {
          return [row = x[r]](const Block<X>& acc, auto extent, int64_t i) {
            const Block<X> value = load<X>(row + i, extent);
            return fma(value, value, acc);
          };
        },
        rstd);
    for (int r = 0; r < count; ++r) rstd[r] = numerics::rstd_of(rstd[r], hidden, eps);
    if (params.rstd != nullptr) {
      memcpy(static_cast<A*>(params.rstd) + row, rstd, static_cast<size_t>(count) * sizeof(A));
    }
    X* const y = static_cast<X*>(params.y) + row * hidden;
    for_each_tile<X>(hidden, [&](auto tile, auto extent, int64_t i) {
      Block<X> w[tile()];
      for (int j = 0; j < tile(); ++j) w[j] = gain_at<X>(gain, extent, i + j * kSize);
      for (int r = 0; r < count; ++r) {
        for (int j = 0; j < tile(); ++j) {
          const int64_t at = i + j * kSize;
          fetch(next[r] + at);
          const Block<X> xhat = load<X>(x[r] + at, extent) * all<X>(rstd[r]);
          store(y + r * hidden + at, apply_gain<W>(w[j], xhat), extent);
        }
      }
    });
  }
}

// Joins a leaf's block at i with the tree of the leaves before it. Level l is row l of `levels`.
template <class X, class Extent>
VEC_INLINE void push_leaf(Block<X> carry, numerics::Accumulate<X>* levels, int64_t index,
                          int64_t hidden, Extent extent, int64_t i) {
  const int depth = numerics::tree_depth(index);
  for (int level = 0; level < depth; ++level) {
    carry = load<X>(levels + level * hidden + i, extent) + carry;
  }
  store(levels + depth * hidden + i, carry, extent);
}

// The sum over `count` leaves that were pushed.
template <class X, class Extent>
VEC_INLINE Block<X> tree_total(const numerics::Accumulate<X>* levels, int64_t count, int64_t hidden,
                               Extent extent, int64_t i) {
  Block<X> total{};
  for (int level = 0; count >> level != 0; ++level) {
    if ((count >> level) & 1) total = load<X>(levels + level * hidden + i, extent) + total;
  }
  return total;
}

// The rows [row, row + count) of leaf number `index` of a unit: their grad_x, and with kWeight their
// part of grad_weight, which goes to `levels`.
template <bool kWeight, class X, class W>
void backward_leaf(const BackwardParams& params, int64_t row, int count,
                   numerics::Accumulate<X>* levels, int64_t index) {
  using A = numerics::Accumulate<X>;
  constexpr int64_t kSize = Block<X>::kSize;
  const Gain<W> gain{static_cast<const W*>(params.weight), params.zero_centered_gamma};
  const int64_t hidden = params.hidden;
  const A* const rstd = static_cast<const A*>(params.rstd) + row;
  X* const grad_x =
      params.grad_x == nullptr ? nullptr : static_cast<X*>(params.grad_x) + row * hidden;
  const X* x[kLeafRows];
  const X* grad_y[kLeafRows];
  const X* grad_sum[kLeafRows];
  for (int r = 0; r < count; ++r) {
    x[r] = row_of<X>(params.x, params.x_layout, row + r);
    grad_y[r] = row_of<X>(params.grad_y, params.grad_y_layout, row + r);
    if (params.grad_sum != nullptr) {
      grad_sum[r] = row_of<X>(params.grad_sum, params.grad_sum_layout, row + r);
    }
  }
  A mean[kLeafRows];
  if (grad_x != nullptr) {
    row_sums<X>(
        count, hidden,
        [&](int r) {
          return [&, r](const Block<X>& acc, auto extent, int64_t i) {
            const Block<X> xhat = load<X>(x[r] + i, extent) * all<X>(rstd[r]);
            const Block<X> w = gain_at<X>(gain, extent, i);
            const Block<X> t = apply_gain<W>(w, load<X>(grad_y[r] + i, extent));
            // 0 * rstd is not 0 where rstd is infinite.
            return fma(t, keep(xhat, extent), acc);
          };
        },
        mean);
    for (int r = 0; r < count; ++r) mean[r] = numerics::mean_of(mean[r], hidden);
  }
  for_each_tile<X>(hidden, [&](auto tile, auto extent, int64_t i) {
    Block<X> w[tile()], leaf[tile()] = {};
    for (int j = 0; j < tile(); ++j) w[j] = gain_at<X>(gain, extent, i + j * kSize);
    for (int r = 0; r < count; ++r) {
      for (int j = 0; j < tile(); ++j) {
        const int64_t at = i + j * kSize;
        const Block<X> xhat = load<X>(x[r] + at, extent) * all<X>(rstd[r]);
        const Block<X> g = load<X>(grad_y[r] + at, extent);
        if constexpr (kWeight) leaf[j] = fma(g, xhat, leaf[j]);
        if (grad_x == nullptr) continue;
        Block<X> value = fma(-xhat, all<X>(mean[r]), apply_gain<W>(w[j], g)) * all<X>(rstd[r]);
        if (params.grad_sum != nullptr) value = value + load<X>(grad_sum[r] + at, extent);
        store(grad_x + r * hidden + at, value, extent);
      }
    }
    if constexpr (kWeight) {
      for (int j = 0; j < tile(); ++j) {
        push_leaf(leaf[j], levels, index, hidden, extent, i + j * kSize);
      }
    }
  });
}

// The units [begin, end), with grad_weight if kWeight.
template <bool kWeight, class X, class W>
void backward_units(const BackwardParams& params, int64_t begin, int64_t end, void* scratch) {
  using A = numerics::Accumulate<X>;
  const int64_t hidden = params.hidden;
  A* const levels = static_cast<A*>(scratch);
  const int64_t unit_rows = params.units.leaves * kLeafRows;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t last = earlier((unit + 1) * unit_rows, params.rows);
    int64_t leaves = 0;
    for (int64_t row = unit * unit_rows; row < last; row += kLeafRows, ++leaves) {
      const int count = static_cast<int>(earlier(row + kLeafRows, last) - row);
      backward_leaf<kWeight, X, W>(params, row, count, levels, leaves);
    }
    if constexpr (kWeight) {
      A* const partial = static_cast<A*>(params.partials) + unit * hidden;
      for_each_block<A>(0, hidden, [&](auto extent, int64_t i) {
        store(partial + i, tree_total<A>(levels, leaves, hidden, extent, i), extent);
      });
    }
  }
}

template <class A, class W>
void join_columns(const BackwardParams& params, int64_t begin, int64_t end) {
  const int64_t hidden = params.hidden;
  const A* const partials = static_cast<const A*>(params.partials);
  W* const grad_weight = static_cast<W*>(params.grad_weight);
  for_each_block<A>(begin, end, [&](auto extent, int64_t i) {
    Block<A> levels[64];
    for (int64_t unit = 0; unit < params.units.count; ++unit) {
      const int depth = numerics::tree_depth(unit);
      Block<A> carry = load<A>(partials + unit * hidden + i, extent);
      for (int level = 0; level < depth; ++level) carry = levels[level] + carry;
      levels[depth] = carry;
    }
    Block<A> total{};
    for (int level = 0; params.units.count >> level != 0; ++level) {
      if ((params.units.count >> level) & 1) total = levels[level] + total;
    }
    store(grad_weight + i, total + all<A>(0), extent);
  });
}
