// The forward pass of one head. E is the arithmetic of the products, T the type of q, k, v and the output.
//
// In both stages the contrast tokens are the rows and the image tokens are the lanes: S = T X^T, where T is t+ stacked
// on t- (2n x d) and X is a block of keys or queries (block x d). The softmax of stage II, over the contrast tokens, is
// then independent in each lane, and that of stage I, over the keys, needs only one reduction over lanes per row.
#pragma once
#include <type_traits>

#include "kernel.h"
#include "products.h"

namespace lineardiff::LINEARDIFF_ISA {
namespace {

constexpr float log2_e = 1.4426950408889634f;

// Keys or queries per block: the widest tiles of a product, one of 4 vectors of 16 lanes or two of 3 vectors of 8.
// Scores of 98 tokens then take 25 or 19 KB, and the products read them from L1 or at worst L2.
constexpr int64_t block = (LINEARDIFF_AVX512 ? 1 : 2) * tile_vectors * lanes;

struct Sizes {
  explicit Sizes(const Problem& p) : d(p.d), D(round_up(p.d, lanes)), n(p.n), n2(2 * p.n) {}
  int64_t d, D, n, n2;  // D: d rounded up to a multiple of the lanes
  template <class E>
  int64_t words(int64_t count) const {
    return (count + E::pack - 1) / E::pack;
  }
};

template <class T>
INLINE T* row_of(const Problem& p, const View& view, int64_t head_index, int64_t row) {
  return (T*)view.data + head_index / p.heads * view.batch + head_index % p.heads * view.head + row * view.row;
}

// Prefetch the rows [row, end) of a head, at most a block. In the output of a projection the rows of a head are too far
// apart for the hardware to predict them.
template <class T>
INLINE void prefetch(const Problem& p, const View& view, int64_t head_index, int64_t row, int64_t end) {
  const T* x = row_of<T>(p, view, head_index, row);
  for (int64_t i = 0; i < smaller(block, end - row); i++, x += view.row)
    for (int64_t c = 0; c < p.d; c += 64 / int64_t(sizeof(T))) __builtin_prefetch(x + c, 0, 2);
}

// Split [begin, end) into blocks of about equal size, all but the last a multiple of the lanes, and call f(first row,
// rows, rows rounded up to a multiple of the lanes) for each.
template <class F>
INLINE void for_blocks(int64_t begin, int64_t end, F f) {
  const int64_t vectors = (end - begin + lanes - 1) / lanes, blocks = (vectors * lanes + block - 1) / block;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t first_vector = vectors * b / blocks, last_vector = vectors * (b + 1) / blocks;
    const int64_t row = begin + first_vector * lanes, padded = (last_vector - first_vector) * lanes;
    f(row, smaller(padded, end - row), padded);
  }
}

// Split `count` vectors into groups of a width known at compile time, and call f(first, width) for each.
template <class F>
INLINE void for_vectors(int64_t count, F f) {
  int64_t j = 0;
  for (; j + 3 <= count; j += 3) f(j, std::integral_constant<int, 3>{});
  if (count - j == 2) f(j, std::integral_constant<int, 2>{});
  if (count - j == 1) f(j, std::integral_constant<int, 1>{});
}

// ---- memory

template <class E>
struct Head {
  Head(const Problem& p, Arena& arena) {
    const Sizes s(p);
    tokens = arena.operand<E>(s.n2, s.D);
    contrast = arena.operand<E>(s.n, s.D);
  }
  Operand<E> tokens;    // t+, then t-
  Operand<E> contrast;  // v^
};

struct Part {  // stage I over a chunk of the keys
  Part(const Problem& p, Arena& arena) {
    const Sizes s(p);
    maximum = arena.take(s.n2);
    sum = arena.take(s.n2);
    read = arena.take(s.n2 * s.D);
  }
  float* maximum;  // (2n): of each token's scores, before scaling
  float* sum;      // (2n): of their exponentials relative to that maximum
  float* read;     // (2n, D): v+ and v-, not yet divided by `sum`
};

template <class E>
struct Scratch {
  Scratch(const Problem& p, Arena& arena) {
    const Sizes s(p);
    transposed = arena.take(s.words<E>(s.d) * block);
    scores = arena.take(round_up(s.n2, 2) * block);
    weights = E::pack == 1 ? scores : arena.take(round_up(s.n2, 2) * block);
    values = arena.take((block + 2) * s.D);
    sums = arena.take(s.n2 * lanes);
  }
  float* transposed;  // a block of keys or queries, transposed
  float* scores;      // (2n, block)
  float* weights;     // computed from the scores, in the format of the next product
  float* values;      // a block of values as pairs (stage I) or of the output (stage II)
  float* sums;        // (2n, lanes)
};

template <class E>
Kernel::Bytes forward_bytes(const Problem& p) {
  return {bytes_of<Head<E>>(p), bytes_of<Part>(p), bytes_of<Scratch<E>>(p)};
}

// The part of one chunk, in a phase that works on all parts of a head.
template <class P>
INLINE P part_of(const Problem& p, const Kernel::Task& task, int64_t chunk) {
  return lay_out<P>(p, (char*)task.part + chunk * bytes_of<P>(p));
}

// ---- tokens

struct Cell {  // the rows and columns of the grid that one contrast token averages, as in adaptive average pooling
  Cell(const Problem& p, int64_t i)
      : top(i / p.w * p.H / p.h),
        bottom(((i / p.w + 1) * p.H + p.h - 1) / p.h),
        left(i % p.w * p.W / p.w),
        right(((i % p.w + 1) * p.W + p.w - 1) / p.w) {}
  Cell() = default;  // empty
  float share() const { return 1.0f / float((bottom - top) * (right - left)); }
  int64_t top = 0, bottom = 0, left = 0, right = 0;
};

template <class E, class T>
INLINE void fill_tokens(const Problem& p, int64_t head_index, const Operand<E>& tokens) {
  const Sizes s(p);
  const T* grid = row_of<T>(p, p.q, head_index, p.prefix());
  auto fill = [&](auto type_of_embedding) {
    using Embedding = decltype(type_of_embedding);
    const Embedding* pos = row_of<Embedding>(p, p.pos, head_index, 0);
    const Embedding* neg = row_of<Embedding>(p, p.neg, head_index, 0);
    for (int64_t i = 0; i < s.n; i++, pos += p.pos.row, neg += p.neg.row) {
      const Cell cell = p.h ? Cell(p, i) : Cell();
      for (int64_t c = 0; c < s.D; c += lanes) {
        Vector average = set(0);
        if (p.h) {
          for (int64_t y = cell.top; y < cell.bottom; y++)
            for (int64_t x = cell.left; x < cell.right; x++)
              average = average + load_first(grid + (y * p.W + x) * p.q.row + c, s.d - c);
          average = average * set(cell.share());
        }
        store(tokens.values + i * s.D + c, average + load_first(pos + c, s.d - c));
        store(tokens.values + (s.n + i) * s.D + c, average + load_first(neg + c, s.d - c));
      }
    }
  };
  p.tokens_bfloat16 ? fill(bfloat16{}) : fill(0.0f);
  fill_rows(tokens, s.n2, s.D);
}

template <class E, class T>
void gather_tokens(const Problem& p, const Kernel::Task& task) {
  fill_tokens<E, T>(p, task.head_index, lay_out<Head<E>>(p, task.head).tokens);
}

// S = T X^T for a block of m rows: (2n, block).
template <class E, class T>
INLINE void score(const Problem& p, const View& view, int64_t head_index, int64_t row, int64_t m, int64_t padded,
                  const float* token_rows, float* transposed, float* scores) {
  const Sizes s(p);
  transpose<E>(row_of<T>(p, view, head_index, row), view.row, m, s.d, transposed, block, padded);
  multiply<E>(s.n2, padded / lanes, s.words<E>(s.d), token_rows, s.D / E::pack, transposed, block, scores, block);
}

INLINE float score_scale(const Problem& p) { return log2_e / __builtin_sqrtf(float(p.d)); }

// ---- stage I

// Update the reference that is subtracted from each token's scores. It need not be their exact maximum: only when an
// exponential would exceed 2^8, which is rare after the first block, is it raised and the sums so far scaled down.
template <class E>
void raise_maximum(const Problem& p, int64_t m, int64_t padded, bool first_block, const Scratch<E>& t,
                   const Part& part) {
  const Sizes s(p);
  const Vector scale = set(score_scale(p));
  const float tolerated = 8 / score_scale(p);
  for (int64_t i = 0; i < s.n2; i++) {
    float *row = t.scores + i * block, *last = row + padded - lanes, *sum = t.sums + i * lanes;
    if (m < padded) store(last, first(m - padded + lanes, load(last), set(-__builtin_inff())));
    Vector highest = load(row);
    for (int64_t j = lanes; j < padded; j += lanes) highest = max(highest, load(row + j));
    if (first_block) {
      part.maximum[i] = max_of_lanes(highest);
      store(sum, set(0));
    } else if (any_greater(highest, set(part.maximum[i] + tolerated))) {
      const float raised = max_of_lanes(highest);
      const Vector shrink = exp2<6>(set(part.maximum[i] - raised) * scale);
      part.maximum[i] = raised;
      store(sum, load(sum) * shrink);
      for (int64_t c = 0; c < s.D; c += lanes) store(part.read + i * s.D + c, load(part.read + i * s.D + c) * shrink);
    }
  }
}

// weights = exp2(scale (score - maximum)), as rows; sums are accumulated per lane. Subtracting before scaling matters
// for large scores: the difference of two close scores is exact, that of their rounded multiples is not.
template <class E>
void exponentiate(const Problem& p, int64_t padded, const Scratch<E>& t, const Part& part) {
  const Sizes s(p);
  const Vector scale = set(score_scale(p));
  for (int64_t i = 0; i < s.n2; i++) {
    const Vector maximum = set(part.maximum[i]);
    Vector total = load(t.sums + i * lanes);
    for_vectors(padded / lanes, [&](int64_t j, auto width) {
      Vector e[width];
      for (int u = 0; u < width; u++)
        e[u] = exp2<E::exp_degree>((load(t.scores + i * block + (j + u) * lanes) - maximum) * scale);
      for (int u = 0; u < width; u++) {
        E::store_row(t.weights + i * block / E::pack, (j + u) * lanes, e[u]);
        total = total + e[u];
      }
    });
    store(t.sums + i * lanes, total);
  }
}

template <class E, class T>
void global_contrast(const Problem& p, const Kernel::Task& task) {
  const Sizes s(p);
  const auto head = lay_out<Head<E>>(p, task.head);
  const auto part = lay_out<Part>(p, task.part);
  const auto t = lay_out<Scratch<E>>(p, task.scratch);
  for_blocks(task.begin, task.end, [&](int64_t row, int64_t m, int64_t padded) {
    const bool first_block = row == task.begin;
    prefetch<T>(p, p.v, task.head_index, row, row + m);
    score<E, T>(p, p.k, task.head_index, row, m, padded, head.tokens.rows, t.transposed, t.scores);
    if (row + m < task.end)
      prefetch<T>(p, p.k, task.head_index, row + m, task.end);
    else  // stage II is next
      prefetch<T>(p, p.q, task.head_index, 0, p.N);
    raise_maximum(p, m, padded, first_block, t, part);
    exponentiate(p, padded, t, part);
    to_pairs<E>(row_of<T>(p, p.v, task.head_index, row), p.v.row, m, s.d, t.values, s.D);
    const int64_t K = s.words<E>(m);
    if (first_block)
      multiply<E>(s.n2, s.D / lanes, K, t.weights, block / E::pack, t.values, s.D, part.read, s.D);
    else
      multiply_and_add<E>(s.n2, s.D / lanes, K, t.weights, block / E::pack, t.values, s.D, part.read, s.D);
  });
  for (int64_t i = 0; i < s.n2; i++) part.sum[i] = sum_of_lanes(load(t.sums + i * lanes));
}

// u = v+ - l1 v- of one token: f(first channel, u, 1 / RMS of the row) for each vector.
template <class F>
INLINE void contrast_row(const Problem& p, const float* plus, const float* minus, F f) {
  const Sizes s(p);
  const Vector lambda = set(-p.lambda1);
  Vector squares = set(0);
  for (int64_t c = 0; c < s.D; c += lanes) {
    const Vector u = fma(load_first(minus + c, s.d - c), lambda, load_first(plus + c, s.d - c));
    squares = fma(u, u, squares);
  }
  const float inverse = 1 / __builtin_sqrtf(sum_of_lanes(squares) / float(s.d) + p.eps);
  for (int64_t c = 0; c < s.D; c += lanes)
    f(c, fma(load_first(minus + c, s.d - c), lambda, load_first(plus + c, s.d - c)), inverse);
}

// v^ = gain1 u / RMS(u) from v+ and v-, (2n, row).
template <class E>
INLINE void norm_contrast(const Problem& p, const float* read, int64_t row, const Operand<E>& contrast) {
  const Sizes s(p);
  for (int64_t i = 0; i < s.n; i++)
    contrast_row(p, read + i * row, read + (s.n + i) * row, [&](int64_t c, Vector u, float inverse) {
      store(contrast.values + i * s.D + c, u * set(inverse) * load_first(p.gain1 + c, s.d - c));
    });
  fill_pairs(contrast, s.n, s.D);
}

// Merge the chunks of stage I into v+ and v-, then compute v^.
template <class E>
void merge_contrast(const Problem& p, const Kernel::Task& task) {
  const Sizes s(p);
  const auto head = lay_out<Head<E>>(p, task.head);
  const auto total = lay_out<Part>(p, task.part);
  for (int64_t chunk = 1; chunk < task.chunks; chunk++) {
    const auto part = part_of<Part>(p, task, chunk);
    for (int64_t i = 0; i < s.n2; i++) {
      const float raised = total.maximum[i] > part.maximum[i] ? total.maximum[i] : part.maximum[i];
      const Vector scale = set(score_scale(p));
      const Vector shrink = exp2<6>(set(total.maximum[i] - raised) * scale);
      const Vector other = exp2<6>(set(part.maximum[i] - raised) * scale);
      total.maximum[i] = raised;
      total.sum[i] = total.sum[i] * shrink[0] + part.sum[i] * other[0];
      for (int64_t c = i * s.D; c < (i + 1) * s.D; c += lanes)
        store(total.read + c, load(total.read + c) * shrink + load(part.read + c) * other);
    }
  }
  for (int64_t i = 0; i < s.n2; i++) {
    const float inverse = 1 / total.sum[i];
    for (int64_t c = i * s.D; c < (i + 1) * s.D; c += lanes) store(total.read + c, load(total.read + c) * set(inverse));
    if (p.saved) {
      float* saved = p.saved + (task.head_index * s.n2 + i) * (s.d + 2);
      memcpy(saved, total.read + i * s.D, 4 * s.d);
      saved[s.d] = total.maximum[i];
      saved[s.d + 1] = inverse;
    }
  }
  norm_contrast(p, total.read, s.D, head.contrast);
}

// ---- stage II

// Replace `width` columns of vectors of scores by their exponentials, and return in `plus` and `minus` the reciprocals
// of the sums of both streams (with a joint softmax, of their common sum).
template <class E, int width>
INLINE void softmax_columns(const Problem& p, float* scores, Vector (&plus)[width], Vector (&minus)[width]) {
  const Sizes s(p);
  const Vector scale = set(score_scale(p));
  for (int stream = 0; stream < 2; stream++) {
    Vector* highest = stream ? minus : plus;
#pragma GCC unroll 4
    for (int u = 0; u < width; u++) highest[u] = set(-__builtin_inff());
    for (int64_t i = stream * s.n; i < (stream + 1) * s.n; i++)
#pragma GCC unroll 4
      for (int u = 0; u < width; u++) highest[u] = max(load(scores + i * block + u * lanes), highest[u]);
  }
  if (p.joint)
    for (int u = 0; u < width; u++) plus[u] = minus[u] = max(plus[u], minus[u]);
  for (int stream = 0; stream < 2; stream++) {
    Vector *highest = stream ? minus : plus, sum[width];
#pragma GCC unroll 4
    for (int u = 0; u < width; u++) sum[u] = set(0);
    for (int64_t i = stream * s.n; i < (stream + 1) * s.n; i++)
#pragma GCC unroll 4
      for (int u = 0; u < width; u++) {
        float* at = scores + i * block + u * lanes;
        const Vector e = exp2<E::exp_degree>((load(at) - highest[u]) * scale);
        store(at, e);
        sum[u] = sum[u] + e;
      }
#pragma GCC unroll 4
    for (int u = 0; u < width; u++) highest[u] = sum[u];
  }
#pragma GCC unroll 4
  for (int u = 0; u < width; u++) {
    const Vector both = plus[u] + minus[u];
    plus[u] = reciprocal(p.joint ? both : plus[u]);
    minus[u] = p.joint ? plus[u] : reciprocal(minus[u]);
  }
}

// weights = softmax(S+) - l2 softmax(S-), the signed attention A^T, (n, block), as pairs.
template <class E>
void signed_attention(const Problem& p, int64_t padded, const Scratch<E>& t) {
  const Sizes s(p);
  for_vectors(padded / lanes, [&](int64_t j, auto width) {
    float* scores = t.scores + j * lanes;
    Vector plus[width], minus[width];
    softmax_columns<E, width>(p, scores, plus, minus);
    for (int u = 0; u < width; u++) minus[u] = minus[u] * set(-p.lambda2);
    for (int64_t i = 0; i < s.n; i += 2)
      for (int u = 0; u < width; u++) {
        const float *e = scores + i * block + u * lanes, *f = e + s.n * block;
        const Vector a0 = fma(load(f), minus[u], load(e) * plus[u]);
        if constexpr (E::pack == 1) {
          store((float*)e, a0);
          if (i + 1 < s.n) store((float*)e + block, fma(load(f + block), minus[u], load(e + block) * plus[u]));
        } else {
          const Vector a1 = i + 1 < s.n ? fma(load(f + block), minus[u], load(e + block) * plus[u]) : set(0);
          E::store_pair(t.weights + i / 2 * block, block, (j + u) * lanes, a0, a1);
        }
      }
  });
}

template <class E, class T>
void patchwise(const Problem& p, const Kernel::Task& task) {
  const Sizes s(p);
  const auto head = lay_out<Head<E>>(p, task.head);
  const auto t = lay_out<Scratch<E>>(p, task.scratch);
  for_blocks(task.begin, task.end, [&](int64_t row, int64_t m, int64_t padded) {
    T* out = row_of<T>(p, p.out, task.head_index, row);
    score<E, T>(p, p.q, task.head_index, row, m, padded, head.tokens.rows, t.transposed, t.scores);
    if (row + m < task.end)
      prefetch<T>(p, p.q, task.head_index, row + m, task.end);
    else if (task.head_index + 1 < p.all_heads())
      prefetch<T>(p, p.k, task.head_index + 1, 0, p.N);
    prefetch<T>(p, p.out, task.head_index, row, row + m);
    signed_attention(p, padded, t);
    multiply_transposed<E>(m, s.D / lanes, s.words<E>(s.n), t.weights, block, head.contrast.pairs, s.D, t.values, s.D);
    for (int64_t i = 0; i < m; i += 2) {  // RMSNorm2, two rows at a time
      const float *o0 = t.values + i * s.D, *o1 = o0 + (i + 1 < m ? s.D : 0);
      Vector squares0 = set(0), squares1 = set(0);
      for (int64_t c = 0; c < s.D; c += lanes) {
        squares0 = fma(load(o0 + c), load(o0 + c), squares0);
        squares1 = fma(load(o1 + c), load(o1 + c), squares1);
      }
      const Vector inverse0 = set(1 / __builtin_sqrtf(sum_of_lanes(squares0) / float(s.d) + p.eps));
      const Vector inverse1 = set(1 / __builtin_sqrtf(sum_of_lanes(squares1) / float(s.d) + p.eps));
      T *out0 = out + i * p.out.row, *out1 = out0 + (i + 1 < m ? p.out.row : 0);
      for (int64_t c = 0; c < s.d; c += lanes) {
        const Vector gain = load_first(p.gain2 + c, s.d - c);
        store_first(out0 + c, s.d - c, load(o0 + c) * inverse0 * gain);
        store_first(out1 + c, s.d - c, load(o1 + c) * inverse1 * gain);
      }
    }
  });
}

}  // namespace
}  // namespace lineardiff::LINEARDIFF_ISA
