// Vectors of one instruction set. Each instruction set is compiled as one object, which defines LINEARDIFF_ISA, the
// name of its namespace, and LINEARDIFF_AVX512, 0 or 1.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define INLINE static inline __attribute__((always_inline))

// Everything here has internal linkage. Otherwise the linker could merge a function with another object's, and a
// machine would run instructions that it does not have.
namespace lineardiff::LINEARDIFF_ISA {
namespace {

INLINE int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

struct bfloat16 {
  uint16_t bits;
};
INLINE float to_float(float x) { return x; }
INLINE float to_float(bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
INLINE void assign(float& to, float x) { to = x; }
INLINE void assign(bfloat16& to, float x) {  // rounds to nearest even, keeps NaN
  uint32_t bits;
  memcpy(&bits, &x, 4);
  to.bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if LINEARDIFF_AVX512

constexpr int lanes = 16, registers = 32;
using Vector = __m512;
INLINE Vector load(const float* p) { return _mm512_loadu_ps(p); }
INLINE Vector load(const bfloat16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE void store(float* p, Vector x) { _mm512_storeu_ps(p, x); }
INLINE Vector set(float x) { return _mm512_set1_ps(x); }
INLINE Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
INLINE Vector reciprocal(Vector x) { return _mm512_div_ps(set(1), x); }
INLINE float max_of_lanes(Vector x) { return _mm512_reduce_max_ps(x); }
INLINE float sum_of_lanes(Vector x) { return _mm512_reduce_add_ps(x); }
INLINE bool any_greater(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
// x in the first `count` lanes, y in the others.
INLINE Vector first(int64_t count, Vector x, Vector y) {
  return _mm512_mask_blend_ps(__mmask16((1u << count) - 1), y, x);
}
INLINE void store(bfloat16* p, Vector x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  rounded = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), rounded, _mm512_set1_epi32(0x7fc00000));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

#else

constexpr int lanes = 8, registers = 16;
using Vector = __m256;
INLINE Vector load(const float* p) { return _mm256_loadu_ps(p); }
INLINE Vector load(const bfloat16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE void store(float* p, Vector x) { _mm256_storeu_ps(p, x); }
INLINE Vector set(float x) { return _mm256_set1_ps(x); }
INLINE Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
INLINE Vector reciprocal(Vector x) { return _mm256_div_ps(set(1), x); }
INLINE float max_of_lanes(Vector x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
INLINE float sum_of_lanes(Vector x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
INLINE bool any_greater(Vector a, Vector b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
INLINE Vector first(int64_t count, Vector x, Vector y) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(int(count)), index)));
}
INLINE void store(bfloat16* p, Vector x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
  const __m128i low = _mm256_castsi256_si128(rounded), high = _mm256_extracti128_si256(rounded, 1);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(low, high));
}

#endif

// Widen 8 bfloat16.
INLINE void store8(float* to, const bfloat16* from) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
  _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
}
INLINE void store8(float* to, const float* from) { _mm256_storeu_ps(to, _mm256_loadu_ps(from)); }

// The first `count` elements, followed by zeros.
template <class T>
INLINE Vector load_first(const T* p, int64_t count) {
  if (count >= lanes) return load(p);
  alignas(64) float values[lanes] = {};
  for (int64_t i = 0; i < count; i++) values[i] = to_float(p[i]);
  return load(values);
}
template <class T>
INLINE void store_first(T* p, int64_t count, Vector x) {
  if (count >= lanes) return store(p, x);
  alignas(64) float values[lanes];
  store(values, x);
  for (int64_t i = 0; i < count; i++) assign(p[i], values[i]);
}

// 2^x for x <= 127, with a relative error of 8e-8 (degree 6) or 1e-4 (degree 3, enough for bfloat16); below -125 the
// result is 0 or nearly 0. x is split into an integer and r in [-1/2, 1/2]. The coefficients of 2^r are those of the
// polynomial of this degree with the smallest maximal relative error on that interval (1.9e-9 and 7.5e-5 before
// rounding; iteratively reweighted least squares, or the Remez algorithm, gives them again).
template <int degree>
INLINE Vector exp2(Vector x) {
#if LINEARDIFF_AVX512
  const Vector r = _mm512_reduce_ps(x, 0);  // x - the nearest integer
#else
  x = max(set(-125), x);  // this order of operands keeps NaN
  const Vector shifted = x + set(0x1.8p23f), r = x - (shifted - set(0x1.8p23f));
#endif
  Vector p;
  if constexpr (degree == 6) {
    p = fma(set(1.5345810e-4f), r, set(1.3399931e-3f));
    p = fma(p, r, set(9.6184891e-3f));
    p = fma(p, r, set(5.5503286e-2f));
    p = fma(p, r, set(2.4022646e-1f));
    p = fma(p, r, set(6.9314718e-1f));
    p = fma(p, r, set(1));
  } else {
    p = fma(set(5.5171667e-2f), r, set(2.4261112e-1f));
    p = fma(p, r, set(6.9326099e-1f));
    p = fma(p, r, set(9.9992807e-1f));
  }
#if LINEARDIFF_AVX512
  return _mm512_scalef_ps(p, x - r);
#else
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);  // the low bits hold the integer
  return p * _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(127 << 23)));
#endif
}

// Transpose an 8 x 8 block of 32-bit words.
INLINE void transpose8(const float* from, int64_t from_row, float* to, int64_t to_row) {
  __m256 a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 4; i++) {
    const float *upper = from + i * from_row, *lower = from + (i + 4) * from_row;
    a[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(upper)), _mm_loadu_ps(lower), 1);
    a[i + 4] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(upper + 4)), _mm_loadu_ps(lower + 4), 1);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4) {
    _mm256_storeu_ps(to + (i + 0) * to_row, _mm256_shuffle_ps(b[i], b[i + 2], 0x44));
    _mm256_storeu_ps(to + (i + 1) * to_row, _mm256_shuffle_ps(b[i], b[i + 2], 0xee));
    _mm256_storeu_ps(to + (i + 2) * to_row, _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44));
    _mm256_storeu_ps(to + (i + 3) * to_row, _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee));
  }
}

}  // namespace
}  // namespace lineardiff::LINEARDIFF_ISA
