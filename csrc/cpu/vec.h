// Vec<A>: whole chunks of the contract side by side, with the contract's operations and the
// conversions from and to memory. Included once for each instruction set, inside an anonymous
// namespace (level.h says why).
//
// The arithmetic is the compiler's vector extension, whose operators round each element on its own;
// fma and the float16 conversions, which it lacks, are named by instruction. The build turns the
// compilers' own vectorising of straight-line code off: GCC 12 makes wrong sums of it at -O3 with
// AVX-512.

template <class T, int kCount>
struct VectorOf {
  typedef T type __attribute__((vector_size(kCount * sizeof(T))));
};

// One register of AVX-512, up to four of the other sets.
template <class A>
constexpr int kLanes = 8;
#if defined(__AVX512F__)
template <>
constexpr int kLanes<float> = 16;
#endif

template <class A>
using Vec = typename VectorOf<A, kLanes<A>>::type;

#define VEC_INLINE static inline __attribute__((always_inline))

// One hardware register's fma.
#if defined(__AVX512F__)
VEC_INLINE __m512 fma_register(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
VEC_INLINE __m512d fma_register(__m512d a, __m512d b, __m512d c) {
  return _mm512_fmadd_pd(a, b, c);
}
template <class A>
using Register = std::conditional_t<sizeof(A) == sizeof(float), __m512, __m512d>;
#elif defined(__FMA__)
VEC_INLINE __m256 fma_register(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
VEC_INLINE __m256d fma_register(__m256d a, __m256d b, __m256d c) {
  return _mm256_fmadd_pd(a, b, c);
}
template <class A>
using Register = std::conditional_t<sizeof(A) == sizeof(float), __m256, __m256d>;
#elif defined(__ARM_NEON)
VEC_INLINE float32x4_t fma_register(float32x4_t a, float32x4_t b, float32x4_t c) {
  return vfmaq_f32(c, a, b);
}
VEC_INLINE float64x2_t fma_register(float64x2_t a, float64x2_t b, float64x2_t c) {
  return vfmaq_f64(c, a, b);
}
template <class A>
using Register = std::conditional_t<sizeof(A) == sizeof(float), float32x4_t, float64x2_t>;
#else
VEC_INLINE float fma_register(float a, float b, float c) { return numerics::fma(a, b, c); }
VEC_INLINE double fma_register(double a, double b, double c) { return numerics::fma(a, b, c); }
template <class A>
using Register = A;
#endif

template <class A>
VEC_INLINE Vec<A> fma(const Vec<A>& a, const Vec<A>& b, const Vec<A>& c) {
  constexpr int kRegisters = sizeof(Vec<A>) / sizeof(Register<A>);
  Register<A> x[kRegisters], y[kRegisters], z[kRegisters];
  memcpy(x, &a, sizeof(x));
  memcpy(y, &b, sizeof(y));
  memcpy(z, &c, sizeof(z));
  for (int i = 0; i < kRegisters; ++i) z[i] = fma_register(x[i], y[i], z[i]);
  Vec<A> result;
  memcpy(&result, z, sizeof(result));
  return result;
}

// Elements of `a` followed by those of `b`, by index.
template <class V, int... kIndex>
VEC_INLINE V shuffle(const V& a, const V& b, std::integer_sequence<int, kIndex...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, kIndex...);
#else
  using Index = std::conditional_t<sizeof(a[0]) == 4, int32_t, int64_t>;
  return __builtin_shuffle(a, b, typename VectorOf<Index, sizeof...(kIndex)>::type{kIndex...});
#endif
}

// Of every 2 kHalf elements of `a` and `b`, the sum of the first and the second half, in order.
template <int kHalf, class V, int... kLane>
VEC_INLINE V join_halves(const V& a, const V& b, std::integer_sequence<int, kLane...>) {
  constexpr auto kFirst = [](int lane) { return lane / kHalf * 2 * kHalf + lane % kHalf; };
  return shuffle(a, b, std::integer_sequence<int, kFirst(kLane)...>{}) +
         shuffle(a, b, std::integer_sequence<int, kFirst(kLane) + kHalf...>{});
}

template <class A>
using Lanes = std::make_integer_sequence<int, kLanes<A>>;

// The chunks' sums, in order, of four vectors that hold four elements of each.
template <class A>
VEC_INLINE Vec<A> join_fours(const Vec<A>& a, const Vec<A>& b, const Vec<A>& c, const Vec<A>& d) {
  const Lanes<A> lanes{};
  return join_halves<1>(join_halves<2>(a, b, lanes), join_halves<2>(c, d, lanes), lanes);
}

// kCount vectors, each joined by halves until kLanes<A> / kCount elements are left of it; in order.
template <int kCount, class A>
VEC_INLINE Vec<A> join_lanes(const Vec<A>* v) {
  if constexpr (kCount == 1) {
    return *v;
  } else {
    return join_halves<kLanes<A> / kCount>(join_lanes<kCount / 2, A>(v),
                                           join_lanes<kCount / 2, A>(v + kCount / 2), Lanes<A>{});
  }
}

// Memory to A and back, kLanes<A> elements.
template <class A, class X>
VEC_INLINE Vec<A> load_vector(const X* from) {
  Vec<A> result;
  if constexpr (sizeof(X) == sizeof(A)) {
    memcpy(&result, from, sizeof(result));
#if defined(__AVX512F__)
  } else if constexpr (std::is_same_v<X, Float16> && sizeof(A) == sizeof(float)) {
    result = (Vec<A>)_mm512_maskz_cvtph_ps(
        0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  } else if constexpr (std::is_same_v<X, Float16> && sizeof(A) == sizeof(float)) {
    result = (Vec<A>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
  } else {
    for (int i = 0; i < kLanes<A>; ++i) result[i] = numerics::to_accumulate<A>(from[i]);
  }
  return result;
}

template <class A, class X>
VEC_INLINE void store_vector(X* to, const Vec<A>& value) {
  if constexpr (sizeof(X) == sizeof(A)) {
    memcpy(to, &value, sizeof(value));
#if defined(__AVX512F__)
  } else if constexpr (std::is_same_v<X, Float16> && sizeof(A) == sizeof(float)) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_maskz_cvtps_ph(0xffff, (__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  } else if constexpr (std::is_same_v<X, Float16> && sizeof(A) == sizeof(float)) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#endif
  } else {
    for (int i = 0; i < kLanes<A>; ++i) to[i] = numerics::round_to<X>(value[i]);
  }
}
