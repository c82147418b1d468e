// Block<X>: consecutive elements of a row of X in A, two vectors of them. Included once for each
// instruction set, inside an anonymous namespace (level.h says why).
//
// Two bfloat16 make a 32-bit word, of which a shift widens the one and a mask the other. So blocks
// of bfloat16 rows hold the elements of even and of odd index, all others the first half and the
// second.
template <class X, class A>
constexpr bool kInPairs = sizeof(A) == sizeof(float) && std::is_same_v<X, BFloat16>;

template <class X>
struct Block {
  using A = numerics::Accumulate<X>;
  static constexpr int64_t kSize = 2 * kLanes<A>;
  static constexpr bool kEvenOdd = kInPairs<X, A>;
  Vec<A> first, second;
};

template <class X>
VEC_INLINE Block<X> operator+(const Block<X>& a, const Block<X>& b) {
  return {a.first + b.first, a.second + b.second};
}
template <class X>
VEC_INLINE Block<X> operator*(const Block<X>& a, const Block<X>& b) {
  return {a.first * b.first, a.second * b.second};
}
template <class X>
VEC_INLINE Block<X> operator-(const Block<X>& a) {
  return {-a.first, -a.second};
}
template <class X>
VEC_INLINE Block<X> fma(const Block<X>& a, const Block<X>& b, const Block<X>& c) {
  using A = typename Block<X>::A;
  return {fma<A>(a.first, b.first, c.first), fma<A>(a.second, b.second, c.second)};
}

// `value` everywhere, its sign too where it is a zero.
template <class X>
VEC_INLINE Block<X> all(typename Block<X>::A value) {
  const Vec<typename Block<X>::A> v = value - Vec<typename Block<X>::A>{};
  return {v, v};
}

// From halves to even and odd, and back.
template <class X, int... kLane>
VEC_INLINE Block<X> split(const Block<X>& b, std::integer_sequence<int, kLane...>) {
  return {shuffle(b.first, b.second, std::integer_sequence<int, 2 * kLane...>{}),
          shuffle(b.first, b.second, std::integer_sequence<int, 2 * kLane + 1 ...>{})};
}
template <class X, int... kLane>
VEC_INLINE Block<X> merge(const Block<X>& b, std::integer_sequence<int, kLane...>) {
  constexpr int kCount = sizeof...(kLane);
  constexpr auto kFrom = [](int index) { return index / 2 + index % 2 * kCount; };
  return {shuffle(b.first, b.second, std::integer_sequence<int, kFrom(kLane)...>{}),
          shuffle(b.first, b.second, std::integer_sequence<int, kFrom(kLane + kCount)...>{})};
}

using Words = VectorOf<uint32_t, kLanes<float>>::type;

// bfloat16 in the upper half of each word; the lower half means nothing. Half a unit in the last
// place is added, or just less where the last bit is even.
VEC_INLINE Words round_upper(const Vec<float>& value) {
  const Words bits = (Words)value;
  const Words quiet_nan = Words{} + 0x7fc00000u;
  const Words half = (bits & 0x10000u) != 0 ? Words{} + 0x8000u : Words{} + 0x7fffu;
  return value == value ? bits + half : quiet_nan;
}

// A block of a row, from elements of any type and to them.
template <class X, class T>
VEC_INLINE Block<X> load(const T* from) {
  using A = typename Block<X>::A;
  if constexpr (kInPairs<T, A>) {
    Words words;
    memcpy(&words, from, sizeof(words));
    const Block<X> pairs{(Vec<A>)(words << 16), (Vec<A>)(words & 0xffff0000u)};
    if constexpr (Block<X>::kEvenOdd) return pairs;
    return merge(pairs, Lanes<A>{});
  } else {
    const Block<X> halves{load_vector<A>(from), load_vector<A>(from + kLanes<A>)};
    if constexpr (!Block<X>::kEvenOdd) return halves;
    return split(halves, Lanes<A>{});
  }
}

template <class X, class T>
VEC_INLINE void store(T* to, Block<X> value) {
  using A = typename Block<X>::A;
  if constexpr (kInPairs<T, A>) {
    if constexpr (!Block<X>::kEvenOdd) value = split(value, Lanes<A>{});
    const Words words = round_upper(value.first) >> 16 | (round_upper(value.second) & 0xffff0000u);
    memcpy(to, &words, sizeof(words));
  } else {
    if constexpr (Block<X>::kEvenOdd) value = merge(value, Lanes<A>{});
    store_vector<A>(to, value.first);
    store_vector<A>(to + kLanes<A>, value.second);
  }
}

// Asks for a block that will be loaded soon. Past the end of a row is no error.
template <class X>
VEC_INLINE void fetch(const X* from) {
  constexpr uintptr_t kLine = 64, kBytes = Block<X>::kSize * sizeof(X);
  for (uintptr_t byte = 0; byte < kBytes; byte += kLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(from) + byte));
  }
}

// How much of a block there is: all of it, or its first `count` elements at the ragged end of a
// row, where +0 is loaded for the rest and nothing stored.
struct Whole {};

template <class X, class T>
VEC_INLINE Block<X> load(const T* from, Whole) {
  return load<X>(from);
}
template <class X, class T>
VEC_INLINE Block<X> load(const T* from, int64_t count) {
  T padded[Block<X>::kSize] = {};
  memcpy(padded, from, static_cast<size_t>(count) * sizeof(T));
  return load<X>(padded);
}
template <class X, class T>
VEC_INLINE void store(T* to, const Block<X>& value, Whole) {
  store(to, value);
}
template <class X, class T>
VEC_INLINE void store(T* to, const Block<X>& value, int64_t count) {
  T padded[Block<X>::kSize];
  store(padded, value);
  memcpy(to, padded, static_cast<size_t>(count) * sizeof(T));
}
template <class X>
VEC_INLINE Block<X> keep(const Block<X>& value, Whole) {
  return value;
}
template <class X>
VEC_INLINE Block<X> keep(const Block<X>& value, int64_t count) {
  typename Block<X>::A elements[Block<X>::kSize];
  store(elements, value);
  return load<X>(elements, count);
}

// Walks elements [begin, end) in blocks: body(extent, i), where extent is Whole or a count.
template <class X, class Body>
VEC_INLINE void for_each_block(int64_t begin, int64_t end, const Body& body) {
  int64_t i = begin;
  for (; i + Block<X>::kSize <= end; i += Block<X>::kSize) body(Whole{}, i);
  if (i < end) body(end - i, i);
}

// The same in tiles of kTile blocks, then in single blocks: body(Tile<blocks>{}, extent, i).
constexpr int kTile = 4;
template <int kBlocks>
using Tile = std::integral_constant<int, kBlocks>;

template <class X, class Body>
VEC_INLINE void for_each_tile(int64_t hidden, const Body& body) {
  constexpr int64_t kSize = kTile * Block<X>::kSize;
  const int64_t tiled = hidden / kSize * kSize;
  for (int64_t i = 0; i < tiled; i += kSize) body(Tile<kTile>{}, Whole{}, i);
  for_each_block<X>(tiled, hidden, [&](auto extent, int64_t i) { body(Tile<1>{}, extent, i); });
}

// The blocks that hold kLanes chunks.
constexpr int kChunkBlocks = kSlots / 2;

// Their slots joined in the contract's order; one sum for each chunk, in order.
template <class X>
VEC_INLINE Vec<typename Block<X>::A> join_slots(const Block<X> (&b)[kChunkBlocks]) {
  using A = typename Block<X>::A;
  if constexpr (Block<X>::kEvenOdd) {  // slots 0, 2, 4, 6 are the one half of the tree
    return join_fours<A>(b[0].first, b[1].first, b[2].first, b[3].first) +
           join_fours<A>(b[0].second, b[1].second, b[2].second, b[3].second);
  } else {
    const Lanes<A> lanes{};
    const auto join = [&](int i) { return join_halves<4>(b[i].first, b[i].second, lanes); };
    return join_fours<A>(join(0), join(1), join(2), join(3));
  }
}
