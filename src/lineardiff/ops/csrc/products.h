// Small matrix products, and the formats of their operands. C (M x columns) = A (M x K) B (K x columns): A is read word
// by word and broadcast, B and C are read as vectors. A word is what one instruction consumes along K: a float, or two
// consecutive bfloat16, which vdpbf16ps multiplies and adds. An r x c matrix therefore has two formats:
//   rows   (r, c / pack) words: consecutive elements of a row share a word. The A of a product over c.
//   pairs  (r / pack, c) words: a word holds the elements of `pack` consecutive rows. The B of a product over r, or its
//          A if that is read transposed.
// For float32 the two are the same.
#pragma once
#include "kernel.h"
#include "simd.h"

namespace lineardiff::LINEARDIFF_ISA {
namespace {

struct Float32 {
  static constexpr int pack = 1, exp_degree = 6;
  INLINE Vector multiply_add(Vector sum, const float* a, Vector b) { return fma(set(*a), b, sum); }
  INLINE void store_row(float* row, int64_t lane, Vector x) { store(row + lane, x); }
  INLINE void store_pair(float* pair, int64_t ld, int64_t lane, Vector x0, Vector x1) {
    store(pair + lane, x0);
    store(pair + ld + lane, x1);
  }
};

#if LINEARDIFF_BF16
struct BFloat16 {  // a float holds the bits of two bfloat16
  static constexpr int pack = 2, exp_degree = 3;
  INLINE Vector multiply_add(Vector sum, const float* a, Vector b) {
    int32_t word;
    memcpy(&word, a, 4);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(word), (__m512bh)_mm512_castps_si512(b));
  }
  INLINE void store_row(float* row, int64_t lane, Vector x) {
    _mm256_storeu_si256((__m256i*)((bfloat16*)row + lane), (__m256i)_mm512_cvtneps_pbh(x));
  }
  INLINE void store_pair(float* pair, int64_t, int64_t lane, Vector x0, Vector x1) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_storeu_si512(pair + lane, _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(x1, x0)));
  }
};
#endif

// ---- products

template <class E, bool transpose_A, bool add, int rows, int vectors>
INLINE void tile(int64_t K, const float* A, int64_t lda, const float* B, int64_t ldb, float* C, int64_t ldc) {
  Vector c[rows][vectors];
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) c[i][j] = add ? load(C + i * ldc + j * lanes) : set(0);
  for (int64_t k = 0; k < K; k++) {
    Vector b[vectors];
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) b[j] = load(B + k * ldb + j * lanes);
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
      const float* a = transpose_A ? A + k * lda + i : A + i * lda + k;
#pragma GCC unroll 4
      for (int j = 0; j < vectors; j++) c[i][j] = E::multiply_add(c[i][j], a, b[j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) store(C + i * ldc + j * lanes, c[i][j]);
}

template <class E, bool transpose_A, bool add, int rows, int vectors>
INLINE void tile_of(int m, int64_t K, const float* A, int64_t lda, const float* B, int64_t ldb, float* C, int64_t ldc) {
  if (m == rows)
    tile<E, transpose_A, add, rows, vectors>(K, A, lda, B, ldb, C, ldc);
  else if constexpr (rows > 1)
    tile_of<E, transpose_A, add, rows - 1, vectors>(m, K, A, lda, B, ldb, C, ldc);
}

// The most rows whose sums still fit in registers, beside the operands.
constexpr int tile_rows(int vectors) {
  if (registers == 32) return vectors == 4 ? 6 : vectors == 3 ? 8 : vectors == 2 ? 10 : 14;
  return vectors == 3 ? 4 : vectors == 2 ? 6 : 8;
}
constexpr int tile_vectors = registers == 32 ? 4 : 3;

// K and lda count words, `columns` counts vectors. `transpose_A` reads A as (K, M), `add` adds to C. There is no
// blocking for caches: B is small enough to stay in L1, and A and C are streamed once.
template <class E, bool transpose_A, bool add>
__attribute__((noinline)) void product(int64_t M, int64_t columns, int64_t K, const float* A, int64_t lda,
                                       const float* B, int64_t ldb, float* C, int64_t ldc) {
  const int64_t strips = (columns + tile_vectors - 1) / tile_vectors, widest = (columns + strips - 1) / strips;
  const int64_t height = tile_rows(int(widest)), tiles = (M + height - 1) / height;
  for (int64_t t = 0, i = 0; t < tiles; t++) {  // tiles of equal height rather than a thin last one
    const int m = int(M * (t + 1) / tiles - i);
    const float* a = A + (transpose_A ? i : i * lda);
    for (int64_t s = 0, j = 0; s < strips; s++) {
      const int64_t vectors = columns * (s + 1) / strips - j;
      const float* b = B + j * lanes;
      float* c = C + i * ldc + j * lanes;
      if (vectors == 1) tile_of<E, transpose_A, add, tile_rows(1), 1>(m, K, a, lda, b, ldb, c, ldc);
      if (vectors == 2) tile_of<E, transpose_A, add, tile_rows(2), 2>(m, K, a, lda, b, ldb, c, ldc);
      if (vectors == 3) tile_of<E, transpose_A, add, tile_rows(3), 3>(m, K, a, lda, b, ldb, c, ldc);
      if constexpr (tile_vectors == 4)
        if (vectors == 4) tile_of<E, transpose_A, add, tile_rows(4), 4>(m, K, a, lda, b, ldb, c, ldc);
      j += vectors;
    }
    i += m;
  }
}

template <class E>
INLINE void multiply(int64_t M, int64_t columns, int64_t K, const float* A, int64_t lda, const float* B, int64_t ldb,
                     float* C, int64_t ldc) {
  product<E, false, false>(M, columns, K, A, lda, B, ldb, C, ldc);
}
template <class E>
INLINE void multiply_and_add(int64_t M, int64_t columns, int64_t K, const float* A, int64_t lda, const float* B,
                             int64_t ldb, float* C, int64_t ldc) {
  product<E, false, true>(M, columns, K, A, lda, B, ldb, C, ldc);
}
template <class E>
INLINE void multiply_transposed(int64_t M, int64_t columns, int64_t K, const float* A, int64_t lda, const float* B,
                                int64_t ldb, float* C, int64_t ldc) {
  product<E, true, false>(M, columns, K, A, lda, B, ldb, C, ldc);
}

// ---- formats

// Copy `rows` rows of `count` elements into an 8 x 8 block of words, and pad it with zeros.
template <class E, class T>
INLINE void copy_block(const T* x, int64_t row, int64_t rows, int64_t count, float* block) {
  memset(block, 0, 64 * sizeof(float));
  for (int64_t i = 0; i < rows; i++, x += row, block += 8)
    if constexpr (sizeof(T) * E::pack == 4)
      memcpy(block, x, count * sizeof(T));
    else
      for (int64_t j = 0; j < count; j++) block[j] = to_float(x[j]);
}

// Transpose rows (m, d) of a tensor into (ceil(d / pack), ld) words. Columns from m to `padded`, a multiple of 8, are
// zeros.
template <class E, class T>
INLINE void transpose(const T* x, int64_t row, int64_t m, int64_t d, float* out, int64_t ld, int64_t padded) {
  constexpr int pack = E::pack;
  constexpr bool same_words = sizeof(T) * pack == 4;
  static_assert(same_words || pack == 1, "elements can be widened here, not narrowed");
  const int64_t words = (d + pack - 1) / pack;
  for (int64_t i = 0; i < padded; i += 8)
    for (int64_t c = 0; c < words; c += 8) {
      const int64_t height = smaller(8, m - i), width = smaller(8, words - c), count = smaller(8 * pack, d - c * pack);
      const T* from = x + i * row + c * pack;
      float* to = out + c * ld + i;
      alignas(64) float block[64], transposed[64];
      const bool full = height == 8 && count == 8 * pack;
      if (same_words && full && row % pack == 0) {  // no copy: the rows consist of words
        transpose8((const float*)from, row / pack, to, ld);
        continue;
      }
      if (!same_words && full)
        for (int r = 0; r < 8; r++) store8(block + 8 * r, from + r * row);
      else
        copy_block<E>(from, row, height, count, block);
      if (width == 8) {
        transpose8(block, 8, to, ld);
      } else {
        transpose8(block, 8, transposed, 8);
        for (int64_t j = 0; j < width; j++) memcpy(to + j * ld, transposed + 8 * j, 32);
      }
    }
}

// Convert rows (m, d) of a tensor to pairs: (ceil(m / pack), D) words, padded with zeros.
template <class E, class T>
INLINE void to_pairs(const T* x, int64_t row, int64_t m, int64_t d, float* out, int64_t D) {
  for (int64_t i = 0; i < m; i += E::pack)
    for (int64_t c = 0; c < d; c += lanes) {
      const Vector x0 = load_first(x + i * row + c, d - c);
      if constexpr (E::pack == 1)
        store(out + i * D + c, x0);
      else
        E::store_pair(out + i / 2 * D, D, c, x0, i + 1 < m ? load_first(x + (i + 1) * row + c, d - c) : set(0));
    }
}

// Convert rows (m, d) of a tensor to rows: (m, D / pack) words, padded with zeros.
template <class E, class T>
INLINE void to_rows(const T* x, int64_t row, int64_t m, int64_t d, float* out, int64_t D) {
  for (int64_t i = 0; i < m; i++)
    for (int64_t c = 0; c < d; c += lanes) E::store_row(out + i * D / E::pack, c, load_first(x + i * row + c, d - c));
}

// An intermediate matrix (r, c), where c is a multiple of the lanes, and its two formats.
template <class E>
struct Operand {
  float *values, *rows, *pairs;
};

template <class E>
INLINE void fill_rows(const Operand<E>& x, int64_t r, int64_t c) {
  if constexpr (E::pack == 2) to_rows<E>(x.values, c, r, c, x.rows, c);
}
template <class E>
INLINE void fill_pairs(const Operand<E>& x, int64_t r, int64_t c) {
  if constexpr (E::pack == 2) to_pairs<E>(x.values, c, r, c, x.pairs, c);
}

// Hands out consecutive memory. With a null base it only counts it.
class Arena {
 public:
  explicit Arena(void* base) : base_((char*)base) {}
  float* take(int64_t count) {
    float* at = base_ ? (float*)(base_ + used_) : nullptr;
    used_ += size_t(round_up(4 * count, 64));
    return at;
  }
  template <class E>
  Operand<E> operand(int64_t r, int64_t c) {
    float* values = take(round_up(r, 2) * c);
    if constexpr (E::pack == 1) return {values, values, values};
    return {values, take(round_up(r, 2) * c / 2), take(round_up(r, 2) / 2 * c)};
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

// A layout is a struct of pointers whose constructor takes them from an arena.
template <class Layout>
INLINE Layout lay_out(const Problem& p, void* memory) {
  Arena arena(memory);
  return Layout(p, arena);
}
template <class Layout>
INLINE size_t bytes_of(const Problem& p) {
  Arena arena(nullptr);
  Layout(p, arena);
  return arena.used();
}

}  // namespace
}  // namespace lineardiff::LINEARDIFF_ISA
