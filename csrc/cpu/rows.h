// The kernels over rows, written once. Included for each instruction set, inside an anonymous
// namespace (level.h says why).

// Walks elements [begin, end) in vectors: body(Whole{}, i) for whole ones, body(count, i) for the
// ragged end, where count is how many elements are left.
struct Whole {};

template <class A, class X>
VEC_INLINE Vec<A> load(const X* from, Whole) {
  return load<A>(from);
}
template <class A, class X>
VEC_INLINE Vec<A> load(const X* from, int64_t count) {
  return load_first<A>(from, count);
}
template <class A, class X>
VEC_INLINE void store(X* to, const Vec<A>& value, Whole) {
  store<A>(to, value);
}
template <class A, class X>
VEC_INLINE void store(X* to, const Vec<A>& value, int64_t count) {
  store_first<A>(to, value, count);
}
template <class A>
VEC_INLINE Vec<A> keep_first(const Vec<A>& value, Whole) {
  return value;
}

template <class A, class Body>
VEC_INLINE void for_each_vector(int64_t begin, int64_t end, const Body& body) {
  int64_t i = begin;
  for (; i + kLanes<A> <= end; i += kLanes<A>) body(Whole{}, i);
  if (i < end) body(end - i, i);
}

template <class A>
VEC_INLINE A join_by_halves(A* values, int count) {
  int half = count / 2;
  for (; half >= kLanes<A>; half /= 2) {
    for (int i = 0; i < half; i += kLanes<A>) {
      store<A>(values + i, load<A>(values + i) + load<A>(values + i + half));
    }
  }
  for (; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) values[i] = values[i] + values[i + half];
  }
  return values[0];
}

// The contract's row_sum. accumulate(acc, extent, i) returns fma(a, b, acc) for the elements from i
// on, with +0 for both factors past the end of the row; extent is Whole or the number of elements
// left. kLanes virtual threads are summed together, in 8 vectors.
template <class A, class Accumulate>
VEC_INLINE A row_sum(int64_t hidden, const Accumulate& accumulate) {
  constexpr int kVectors = 8;
  constexpr int64_t kSpan = kVectors * kLanes<A>;
  constexpr int kMaxParts = kGroup / kLanes<A>;
  static_assert(numerics::kMinVirtualThreads % kLanes<A> == 0, "a part of a group is whole");
  const int threads = numerics::virtual_threads(hidden);
  const int parts = (threads < kGroup ? threads : kGroup) / kLanes<A>;
  const int groups = threads / (parts * kLanes<A>);
  const int64_t stride = int64_t{threads} * kSlots;
  A group_sums[numerics::kMaxGroups];
  for (int group = 0; group < groups; ++group) {
    Vec<A> sums[kMaxParts];
    for (int part = 0; part < parts; ++part) {
      Vec<A> acc[kVectors] = {};
      int64_t i = (int64_t{group} * parts + part) * kSpan;
      for (; i + kSpan <= hidden; i += stride) {
#pragma GCC unroll 8
        for (int j = 0; j < kVectors; ++j) {
          acc[j] = accumulate(acc[j], Whole{}, i + j * kLanes<A>);
        }
      }
      for (int j = 0; j < kVectors && i < hidden; ++j, i += kLanes<A>) {
        if (i + kLanes<A> <= hidden) {
          acc[j] = accumulate(acc[j], Whole{}, i);
        } else {
          acc[j] = accumulate(acc[j], hidden - i, i);
        }
      }
      sums[part] = join_slots<A>(acc);
    }
    for (int half = parts / 2; half > 0; half /= 2) {
      for (int part = 0; part < half; ++part) sums[part] = sums[part] + sums[part + half];
    }
    group_sums[group] = join_lanes<A>(sums[0]);
  }
  return numerics::finish_sum(join_by_halves(group_sums, groups));
}

// The gain w of the formula: A(weight), or A(weight) + 1; `apply` leaves its argument alone without
// weight.
template <class A, class W>
struct Gain {
  const W* weight;
  bool zero_centered;

  template <class Extent>
  VEC_INLINE Vec<A> apply(const Gain& gain, const Vec<A>& value, Extent extent, int64_t i) {
    if constexpr (std::is_same_v<W, NoWeight>) {
      return value;
    } else {
      const Vec<A> w = load<A>(gain.weight + i, extent);
      return value * (gain.zero_centered ? w + A(1) : w);
    }
  }
};

template <class X>
VEC_INLINE const X* row_of(const void* tensor, const numerics::RowLayout& layout, int64_t row) {
  return static_cast<const X*>(tensor) + numerics::row_offset(layout, row);
}

template <class X>
VEC_INLINE void add_row(const X* x, const X* residual, X* sum, int64_t hidden) {
  using A = numerics::Accumulate<X>;
  for_each_vector<A>(0, hidden, [&](auto extent, int64_t i) {
    store<A>(sum + i, load<A>(x + i, extent) + load<A>(residual + i, extent), extent);
  });
}

template <class X, class W>
void forward_rows_with(const ForwardParams& params, const Gain<numerics::Accumulate<X>, W>& gain,
                       int64_t begin, int64_t end) {
  using A = numerics::Accumulate<X>;
  const A eps = static_cast<A>(params.eps);
  const int64_t hidden = params.hidden;
  for (int64_t row = begin; row < end; ++row) {
    const X* x = row_of<X>(params.x, params.x_layout, row);
    X* y = static_cast<X*>(params.y) + row * hidden;
    if (params.residual != nullptr) {
      X* sum = static_cast<X*>(params.sum) + row * hidden;
      add_row(x, row_of<X>(params.residual, params.residual_layout, row), sum, hidden);
      x = sum;
    }
    const A squares = row_sum<A>(hidden, [x](const Vec<A>& acc, auto extent, int64_t i) {
      const Vec<A> value = load<A>(x + i, extent);
      return fma<A>(value, value, acc);
    });
    const A rstd = numerics::rstd_of(squares, hidden, eps);
    if (params.rstd != nullptr) static_cast<A*>(params.rstd)[row] = rstd;
    for_each_vector<A>(0, hidden, [&](auto extent, int64_t i) {
      const Vec<A> xhat = load<A>(x + i, extent) * rstd;
      store<A>(y + i, Gain<A, W>::apply(gain, xhat, extent, i), extent);
    });
  }
}

template <class X, class W>
void forward_rows(const ForwardParams& params, int64_t begin, int64_t end) {
  using A = numerics::Accumulate<X>;
  const Gain<A, W> gain{static_cast<const W*>(params.weight), params.zero_centered_gamma};
  if constexpr (!std::is_same_v<W, NoWeight>) {
    // Short rows share the conversion of their gains.
    constexpr int64_t kMaxConverted = 512;
    if (params.hidden <= kMaxConverted && end - begin > 1) {
      A gains[kMaxConverted];
      for_each_vector<A>(0, params.hidden, [&](auto extent, int64_t i) {
        store<A>(gains + i, Gain<A, W>::apply(gain, Vec<A>{} + A(1), extent, i), extent);
      });
      return forward_rows_with<X, A>(params, {gains, false}, begin, end);
    }
  }
  forward_rows_with<X, W>(params, gain, begin, end);
}

// One row of grad_x, and of a leaf's sums where `leaf` is not null.
template <class X, class W>
VEC_INLINE void backward_row(const BackwardParams& params, int64_t row,
                             numerics::Accumulate<X>* leaf) {
  using A = numerics::Accumulate<X>;
  using RowGain = Gain<A, W>;
  const RowGain gain{static_cast<const W*>(params.weight), params.zero_centered_gamma};
  const int64_t hidden = params.hidden;
  const X* x = row_of<X>(params.x, params.x_layout, row);
  const X* grad_y = row_of<X>(params.grad_y, params.grad_y_layout, row);
  X* grad_x = params.grad_x == nullptr ? nullptr : static_cast<X*>(params.grad_x) + row * hidden;
  const A rstd = static_cast<const A*>(params.rstd)[row];

  A mean = 0;
  if (grad_x != nullptr) {
    const A sum = row_sum<A>(hidden, [&](const Vec<A>& acc, auto extent, int64_t i) {
      const Vec<A> xhat = load<A>(x + i, extent) * rstd;
      const Vec<A> t = RowGain::apply(gain, load<A>(grad_y + i, extent), extent, i);
      // 0 * rstd is not 0 where rstd is infinite.
      return fma<A>(t, keep_first<A>(xhat, extent), acc);
    });
    mean = numerics::mean_of(sum, hidden);
  }
  const Vec<A> means = Vec<A>{} + mean;  // never -0: a row sum is finished by adding +0
  const auto write = [&](const auto& plus_grad_sum) {
    for_each_vector<A>(0, hidden, [&](auto extent, int64_t i) {
      const Vec<A> xhat = load<A>(x + i, extent) * rstd;
      const Vec<A> g = load<A>(grad_y + i, extent);
      if (grad_x != nullptr) {
        const Vec<A> t = RowGain::apply(gain, g, extent, i);
        store<A>(grad_x + i, plus_grad_sum(fma<A>(-xhat, means, t) * rstd, extent, i), extent);
      }
      if (leaf != nullptr) store<A>(leaf + i, fma<A>(g, xhat, load<A>(leaf + i, extent)), extent);
    });
  };
  if (params.grad_sum == nullptr) {
    write([](const Vec<A>& value, auto, int64_t) { return value; });
  } else {
    const X* grad_sum = row_of<X>(params.grad_sum, params.grad_sum_layout, row);
    write([grad_sum](const Vec<A>& value, auto extent, int64_t i) {
      return value + load<A>(grad_sum + i, extent);
    });
  }
}

// Level l of a unit's tree is row l of `levels`.
template <class A>
VEC_INLINE void push_leaf(const A* leaf, A* levels, int64_t index, int64_t hidden) {
  const int depth = numerics::tree_depth(index);
  for_each_vector<A>(0, hidden, [&](auto extent, int64_t i) {
    Vec<A> carry = load<A>(leaf + i, extent);
    for (int level = 0; level < depth; ++level) {
      carry = load<A>(levels + level * hidden + i, extent) + carry;
    }
    store<A>(levels + depth * hidden + i, carry, extent);
  });
}

// The sum over `count` leaves that were pushed.
template <class A, class Extent>
VEC_INLINE Vec<A> tree_total(const A* levels, int64_t count, int64_t hidden, Extent extent,
                             int64_t i) {
  Vec<A> total{};
  for (int level = 0; count >> level != 0; ++level) {
    if ((count >> level) & 1) total = load<A>(levels + level * hidden + i, extent) + total;
  }
  return total;
}

template <class X, class W>
void backward_units(const BackwardParams& params, int64_t begin, int64_t end, void* scratch) {
  using A = numerics::Accumulate<X>;
  const int64_t hidden = params.hidden;
  const bool want_weight = params.grad_weight != nullptr;
  A* const leaf = want_weight ? static_cast<A*>(scratch) : nullptr;
  A* const levels = want_weight ? leaf + hidden : nullptr;
  const int64_t unit_rows = params.unit_leaves * kLeafRows;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t last =
        (unit + 1) * unit_rows < params.rows ? (unit + 1) * unit_rows : params.rows;
    int64_t leaves = 0;
    for (int64_t row = unit * unit_rows; row < last; row += kLeafRows, ++leaves) {
      const int64_t leaf_end = row + kLeafRows < last ? row + kLeafRows : last;
      if (want_weight) memset(leaf, 0, static_cast<size_t>(hidden) * sizeof(A));
      for (int64_t r = row; r < leaf_end; ++r) backward_row<X, W>(params, r, leaf);
      if (want_weight) push_leaf(leaf, levels, leaves, hidden);
    }
    if (!want_weight) continue;
    A* const partial = static_cast<A*>(params.partials) + unit * hidden;
    for_each_vector<A>(0, hidden, [&](auto extent, int64_t i) {
      store<A>(partial + i, tree_total<A>(levels, leaves, hidden, extent, i), extent);
    });
  }
}

template <class A, class W>
void join_columns(const BackwardParams& params, int64_t begin, int64_t end) {
  const int64_t hidden = params.hidden;
  const A* const partials = static_cast<const A*>(params.partials);
  W* const grad_weight = static_cast<W*>(params.grad_weight);
  for_each_vector<A>(begin, end, [&](auto extent, int64_t i) {
    Vec<A> levels[64];
    for (int64_t unit = 0; unit < params.units; ++unit) {
      const int depth = numerics::tree_depth(unit);
      Vec<A> carry = load<A>(partials + unit * hidden + i, extent);
      for (int level = 0; level < depth; ++level) carry = levels[level] + carry;
      levels[depth] = carry;
    }
    Vec<A> total{};
    for (int level = 0; params.units >> level != 0; ++level) {
      if ((params.units >> level) & 1) total = levels[level] + total;
    }
    store<A>(grad_weight + i, total + A(0), extent);
  });
}
