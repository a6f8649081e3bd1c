// The backward pass of one head. Scores and softmaxes are recomputed block by block, so that memory stays linear in N;
// v+ and v- are saved by the forward pass. With g(x) the gradient of x and s = 1 / sqrt d:
//
//   stage II   w = A v^, o = gain2 w / rms(w);  g(A) = g(w) v^^T;  g(v^) += A^T g(w)
//              g(S+) = s P+ (g(A) - rowsum P+ g(A)),  g(S-) = -l2 s P- (g(A) - rowsum P- g(A))
//              g(q) = g(S) T,  g(T) += g(S)^T q
//   stage I    v^ = gain1 u / rms(u), u = v+ - l1 v-;  g(v+) = g(u), g(v-) = -l1 g(u)
//              g(v) = (P+ - l1 P-)^T g(u)
//              g(S+) = s P+ (g(u) v^T - g(u) . v+),  g(S-) = -l1 s P- (g(u) v^T - g(u) . v-)
//              g(k) = g(S)^T T,  g(T) += g(S) k
#pragma once
#include "forward.h"

namespace lineardiff::LINEARDIFF_ISA {
namespace {

template <class E>
struct BackwardHead : Head<E> {
  BackwardHead(const Problem& p, Arena& arena) : Head<E>(p, arena) {
    const Sizes s(p);
    difference = arena.operand<E>(s.n, s.D);
    dots = arena.take(s.n2);
    statistics = arena.take(2 * s.n2);
  }
  Operand<E> difference;  // g(u)
  float* dots;            // g(u) . v+, g(u) . v-
  float* statistics;      // of each token in stage I: the maxima, then 1 / the sums
};

struct BackwardPart {  // sums over a chunk of the queries, then of the keys
  BackwardPart(const Problem& p, Arena& arena) {
    const Sizes s(p);
    tokens = arena.take(s.n2 * s.D);
    contrast = arena.take(s.n * s.D);
    gain2 = arena.take(s.D);
    lambda2 = arena.take(lanes);
  }
  float *tokens, *contrast;  // g(T), g(v^)
  float *gain2, *lambda2;
};

template <class E>
struct BackwardScratch {
  BackwardScratch(const Problem& p, Arena& arena) {
    const Sizes s(p);
    transposed = arena.take(s.words<E>(s.d) * block);
    scores = arena.operand<E>(s.n2, block);
    attention = arena.operand<E>(s.n, block);
    product = arena.take(s.n * block);
    read = arena.operand<E>(block, s.D);
    pairs = arena.take((block + 2) * s.D);
  }
  float* transposed;     // a block of keys, queries, values or g(w), transposed
  Operand<E> scores;     // (2n, block): S, the softmaxes, g(S)
  Operand<E> attention;  // (n, block): A in stage II, P+ - l1 P- in stage I
  float* product;        // (n, block): g(A) in stage II, g(u) v^T in stage I
  Operand<E> read;       // (block, D): w, then g(w) in stage II; g(q), g(k), g(v) before they are converted
  float* pairs;          // (block, D): queries or keys as pairs
};

template <class E>
Kernel::Bytes backward_bytes(const Problem& p) {
  return {bytes_of<BackwardHead<E>>(p), bytes_of<BackwardPart>(p), bytes_of<BackwardScratch<E>>(p)};
}

// Restore what the forward pass held of a head.
template <class E, class T>
void restore(const Problem& p, const Kernel::Task& task) {
  const Sizes s(p);
  const auto head = lay_out<BackwardHead<E>>(p, task.head);
  fill_tokens<E, T>(p, task.head_index, head.tokens);
  fill_pairs(head.tokens, s.n2, s.D);
  for (int64_t i = 0; i < s.n2; i++) {
    const float* saved = p.saved + (task.head_index * s.n2 + i) * (s.d + 2) + s.d;
    head.statistics[i] = saved[0];
    head.statistics[s.n2 + i] = saved[1];
  }
  norm_contrast(p, p.saved + task.head_index * s.n2 * (s.d + 2), s.d + 2, head.contrast);
  fill_rows(head.contrast, s.n, s.D);
}

// Convert rows (m, d) of a product and write them to a gradient.
template <class E, class T>
INLINE void write(const Problem& p, const View& view, int64_t head_index, int64_t row, int64_t m, const float* from) {
  const Sizes s(p);
  T* to = row_of<T>(p, view, head_index, row);
  for (int64_t i = 0; i < m; i++, to += view.row) {
    for (int64_t c = 0; c < s.d; c += lanes) store_first(to + c, s.d - c, load(from + i * s.D + c));
  }
}

// Replace w by g(w), and add to g(gain2).
template <class E, class T>
void norm_backward(const Problem& p, int64_t head_index, int64_t row, int64_t m, const Operand<E>& w, float* gain2) {
  const Sizes s(p);
  const T* g = row_of<T>(p, p.grad, head_index, row);
  for (int64_t i = 0; i < m; i++, g += p.grad.row) {
    float* x = w.values + i * s.D;
    Vector squares = set(0), along = set(0);
    for (int64_t c = 0; c < s.D; c += lanes) {
      const Vector gained = load_first(g + c, s.d - c) * load_first(p.gain2 + c, s.d - c);
      squares = fma(load(x + c), load(x + c), squares);
      along = fma(gained, load(x + c), along);
    }
    const float inverse = 1 / __builtin_sqrtf(sum_of_lanes(squares) / float(s.d) + p.eps);
    const Vector mean = set(sum_of_lanes(along) / float(s.d) * inverse * inverse), scale = set(inverse);
    for (int64_t c = 0; c < s.D; c += lanes) {
      const Vector given = load_first(g + c, s.d - c);
      store(gain2 + c, fma(given * scale, load(x + c), load(gain2 + c)));
      store(x + c, scale * (given * load_first(p.gain2 + c, s.d - c) - mean * load(x + c)));
    }
  }
}

// From g(A) in `product` and the softmaxes in `scores`: g(S), in place of the softmaxes, and g(l2).
template <class E>
void attention_backward(const Problem& p, int64_t padded, const BackwardScratch<E>& t, float* lambda2) {
  const Sizes s(p);
  const Vector scale = set(1 / __builtin_sqrtf(float(s.d))), negative = set(-p.lambda2);
  for_vectors(padded / lanes, [&](int64_t j, auto width) {
    for (int u = 0; u < width; u++) {
      const int64_t lane = (j + u) * lanes;
      Vector dot_plus = set(0), dot_minus = set(0);
      for (int64_t i = 0; i < s.n; i++) {
        const Vector g = load(t.product + i * block + lane);
        dot_plus = fma(load(t.scores.values + i * block + lane), g, dot_plus);
        dot_minus = fma(load(t.scores.values + (s.n + i) * block + lane), g, dot_minus);
      }
      store(lambda2, load(lambda2) - dot_minus);
      if (p.joint) dot_plus = fma(negative, dot_minus, dot_plus);
      for (int64_t i = 0; i < s.n; i++) {
        float *plus = t.scores.values + i * block + lane, *minus = plus + s.n * block;
        const Vector g = load(t.product + i * block + lane);
        store(plus, scale * load(plus) * (g - dot_plus));
        store(minus,
              scale * load(minus) * (p.joint ? fma(negative, g, set(0) - dot_plus) : negative * (g - dot_minus)));
      }
    }
  });
}

template <class E, class T>
void patchwise_backward(const Problem& p, const Kernel::Task& task) {
  const Sizes s(p);
  const auto head = lay_out<BackwardHead<E>>(p, task.head);
  const auto part = lay_out<BackwardPart>(p, task.part);
  const auto t = lay_out<BackwardScratch<E>>(p, task.scratch);
  memset(task.part, 0, bytes_of<BackwardPart>(p));
  for_blocks(task.begin, task.end, [&](int64_t row, int64_t m, int64_t padded) {
    const int64_t K = s.words<E>(m), columns = s.D / lanes;
    prefetch<T>(p, p.grad, task.head_index, row, row + m);
    score<E, T>(p, p.q, task.head_index, row, m, padded, head.tokens.rows, t.transposed, t.scores.values);
    for_vectors(padded / lanes, [&](int64_t j, auto width) {
      float* scores = t.scores.values + j * lanes;
      Vector plus[width], minus[width];
      softmax_columns<E, width>(p, scores, plus, minus);
      for (int64_t i = 0; i < s.n; i++)
        for (int u = 0; u < width; u++) {
          float *e = scores + i * block + u * lanes, *f = e + s.n * block;
          const Vector x = load(e) * plus[u], y = load(f) * minus[u];
          store(e, x);
          store(f, y);
          store(t.attention.values + i * block + (j + u) * lanes, fma(y, set(-p.lambda2), x));
        }
    });
    if (m < padded)  // the padding must not contribute to the products along the queries
      for (int64_t i = 0; i < s.n; i++) {
        float* last = t.attention.values + i * block + padded - lanes;
        store(last, first(m - padded + lanes, load(last), set(0)));
      }
    fill_pairs(t.attention, s.n, block);
    fill_rows(t.attention, s.n, block);
    multiply_transposed<E>(m, columns, s.words<E>(s.n), t.attention.pairs, block, head.contrast.pairs, s.D,
                           t.read.values, s.D);
    norm_backward<E, T>(p, task.head_index, row, m, t.read, part.gain2);

    fill_rows(t.read, m, s.D);
    fill_pairs(t.read, m, s.D);
    if constexpr (E::pack == 1)
      transpose<E>(t.read.rows, s.D, m, s.d, t.transposed, block, padded);
    else
      transpose<E>((const bfloat16*)t.read.rows, s.D, m, s.d, t.transposed, block, padded);
    multiply<E>(s.n, padded / lanes, s.words<E>(s.d), head.contrast.rows, s.D / E::pack, t.transposed, block, t.product,
                block);
    attention_backward(p, padded, t, part.lambda2);
    prefetch<T>(p, p.q, task.head_index, row + m, task.end);
    prefetch<T>(p, p.dq, task.head_index, row, row + m);
    multiply_and_add<E>(s.n, columns, K, t.attention.rows, block / E::pack, t.read.pairs, s.D, part.contrast, s.D);

    fill_rows(t.scores, s.n2, block);
    fill_pairs(t.scores, s.n2, block);
    to_pairs<E>(row_of<T>(p, p.q, task.head_index, row), p.q.row, m, s.d, t.pairs, s.D);
    multiply_and_add<E>(s.n2, columns, K, t.scores.rows, block / E::pack, t.pairs, s.D, part.tokens, s.D);
    multiply_transposed<E>(m, columns, s.words<E>(s.n2), t.scores.pairs, block, head.tokens.pairs, s.D, t.read.values,
                           s.D);
    write<E, T>(p, p.dq, task.head_index, row, m, t.read.values);
  });
}

INLINE void accumulate(float* to, const float* from, int64_t count) {
  for (int64_t c = 0; c < count; c += lanes) store(to + c, load(to + c) + load(from + c));
}

// dots = g(u) . v+ and g(u) . v-, from v+ and v-, (2n, d + 2). Each is accumulated channel by channel like g(u) v^T in
// `product`: where a softmax is one-hot, v+ equals the value of one key, and the difference g(u) v^T - g(u) . v+ of
// that key must vanish, because a large token multiplies it in g(k).
template <class E>
INLINE void dot_read(const Problem& p, const float* read, const BackwardHead<E>& head) {
  const Sizes s(p);
  constexpr int at_once = 4;  // independent sums hide the latency of an addition
  for (int64_t i = 0; i < s.n; i += at_once) {
    float plus[at_once] = {}, minus[at_once] = {};
    const int64_t count = smaller(at_once, s.n - i);
    for (int64_t c = 0; c < s.d; c++)
      for (int64_t u = 0; u < count; u++) {
        const float g = head.difference.values[(i + u) * s.D + c];
        plus[u] = __builtin_fmaf(g, read[(i + u) * (s.d + 2) + c], plus[u]);
        minus[u] = __builtin_fmaf(g, read[(s.n + i + u) * (s.d + 2) + c], minus[u]);
      }
    memcpy(head.dots + i, plus, count * sizeof(float));
    memcpy(head.dots + s.n + i, minus, count * sizeof(float));
  }
}

// Merge g(v^) of the chunks, then compute g(u), g(gain1) and g(l1).
template <class E>
void merge_contrast_backward(const Problem& p, const Kernel::Task& task) {
  const Sizes s(p);
  const auto head = lay_out<BackwardHead<E>>(p, task.head);
  const auto total = lay_out<BackwardPart>(p, task.part);
  for (int64_t chunk = 1; chunk < task.chunks; chunk++) {
    const auto part = part_of<BackwardPart>(p, task, chunk);
    accumulate(total.contrast, part.contrast, s.n * s.D);
    accumulate(total.gain2, part.gain2, s.D);
    accumulate(total.lambda2, part.lambda2, lanes);
  }
  float *gain1 = p.sums + task.head_index * (2 * s.d + 2), *gain2 = gain1 + s.d, *lambdas = gain2 + s.d;
  memset(gain1, 0, 4 * (2 * s.d + 2));
  memcpy(gain2, total.gain2, 4 * s.d);
  lambdas[1] = sum_of_lanes(load(total.lambda2));
  for (int64_t i = 0; i < s.n; i++) {
    const float* plus = p.saved + (task.head_index * s.n2 + i) * (s.d + 2);
    const float* minus = plus + s.n * (s.d + 2);
    const float* g = total.contrast + i * s.D;
    float* du = head.difference.values + i * s.D;
    Vector along = set(0);
    contrast_row(p, plus, minus, [&](int64_t c, Vector u, float) {
      along = fma(load(g + c) * load_first(p.gain1 + c, s.d - c), u, along);
    });
    const float mean = sum_of_lanes(along) / float(s.d);
    contrast_row(p, plus, minus, [&](int64_t c, Vector u, float inverse) {
      const int64_t count = s.d - c;
      const Vector scale = set(inverse), gain = load_first(p.gain1 + c, count);
      const Vector x = scale * (load(g + c) * gain - set(mean * inverse * inverse) * u);
      store_first(gain1 + c, count, fma(load(g + c) * scale, u, load_first(gain1 + c, count)));
      store(du + c, x);
    });
  }
  dot_read(p, p.saved + task.head_index * s.n2 * (s.d + 2), head);
  for (int64_t i = 0; i < s.n; i++) lambdas[0] -= head.dots[s.n + i];
  fill_rows(head.difference, s.n, s.D);
  fill_pairs(head.difference, s.n, s.D);
}

template <class E, class T>
void global_contrast_backward(const Problem& p, const Kernel::Task& task) {
  const Sizes s(p);
  const auto head = lay_out<BackwardHead<E>>(p, task.head);
  const auto part = lay_out<BackwardPart>(p, task.part);
  const auto t = lay_out<BackwardScratch<E>>(p, task.scratch);
  const Vector log_scale = set(score_scale(p)), scale = set(1 / __builtin_sqrtf(float(s.d)));
  const Vector negative = set(-p.lambda1);
  for_blocks(task.begin, task.end, [&](int64_t row, int64_t m, int64_t padded) {
    const int64_t columns = s.D / lanes;
    prefetch<T>(p, p.k, task.head_index, row, row + m);
    transpose<E>(row_of<T>(p, p.v, task.head_index, row), p.v.row, m, s.d, t.transposed, block, padded);
    multiply<E>(s.n, padded / lanes, s.words<E>(s.d), head.difference.rows, s.D / E::pack, t.transposed, block,
                t.product, block);
    score<E, T>(p, p.k, task.head_index, row, m, padded, head.tokens.rows, t.transposed, t.scores.values);
    for (int64_t i = 0; i < s.n; i++) {
      const float *maximum = head.statistics + i, *inverse = maximum + s.n2;
      const Vector maximum_plus = set(maximum[0]), maximum_minus = set(maximum[s.n]);
      const Vector share_plus = set(inverse[0]), share_minus = set(inverse[s.n]);
      const Vector dot_plus = set(head.dots[i]), dot_minus = set(head.dots[s.n + i]);
      for (int64_t lane = 0; lane < padded; lane += lanes) {
        float *plus = t.scores.values + i * block + lane, *minus = plus + s.n * block;
        Vector x = exp2<E::exp_degree>((load(plus) - maximum_plus) * log_scale) * share_plus;
        Vector y = exp2<E::exp_degree>((load(minus) - maximum_minus) * log_scale) * share_minus;
        if (lane + lanes > m) {
          x = first(m - lane, x, set(0));
          y = first(m - lane, y, set(0));
        }
        const Vector g = load(t.product + i * block + lane);
        store(t.attention.values + i * block + lane, fma(y, negative, x));
        store(plus, scale * x * (g - dot_plus));
        store(minus, scale * negative * y * (g - dot_minus));
      }
    }
    prefetch<T>(p, p.v, task.head_index, row + m, task.end);
    prefetch<T>(p, p.dv, task.head_index, row, row + m);
    prefetch<T>(p, p.dk, task.head_index, row, row + m);
    fill_pairs(t.attention, s.n, block);
    multiply_transposed<E>(m, columns, s.words<E>(s.n), t.attention.pairs, block, head.difference.pairs, s.D,
                           t.read.values, s.D);
    write<E, T>(p, p.dv, task.head_index, row, m, t.read.values);

    fill_rows(t.scores, s.n2, block);
    fill_pairs(t.scores, s.n2, block);
    to_pairs<E>(row_of<T>(p, p.k, task.head_index, row), p.k.row, m, s.d, t.pairs, s.D);
    multiply_and_add<E>(s.n2, columns, s.words<E>(m), t.scores.rows, block / E::pack, t.pairs, s.D, part.tokens, s.D);
    multiply_transposed<E>(m, columns, s.words<E>(s.n2), t.scores.pairs, block, head.tokens.pairs, s.D, t.read.values,
                           s.D);
    write<E, T>(p, p.dk, task.head_index, row, m, t.read.values);
  });
}

// Merge g(T) of the chunks and write g(pos) and g(neg). With pooling, replace v^ by what each query of a cell receives.
template <class E>
void merge_tokens_backward(const Problem& p, const Kernel::Task& task) {
  const Sizes s(p);
  const auto head = lay_out<BackwardHead<E>>(p, task.head);
  const auto total = lay_out<BackwardPart>(p, task.part);
  for (int64_t chunk = 1; chunk < task.chunks; chunk++)
    accumulate(total.tokens, part_of<BackwardPart>(p, task, chunk).tokens, s.n2 * s.D);
  if (p.tokens_bfloat16) {
    write<E, bfloat16>(p, p.dpos, task.head_index, 0, s.n, total.tokens);
    write<E, bfloat16>(p, p.dneg, task.head_index, 0, s.n, total.tokens + s.n * s.D);
  } else {
    write<E, float>(p, p.dpos, task.head_index, 0, s.n, total.tokens);
    write<E, float>(p, p.dneg, task.head_index, 0, s.n, total.tokens + s.n * s.D);
  }
  if (p.h)
    for (int64_t i = 0; i < s.n; i++) {
      const Vector share = set(Cell(p, i).share());
      for (int64_t c = i * s.D; c < (i + 1) * s.D; c += lanes)
        store(head.contrast.values + c, (load(total.tokens + c) + load(total.tokens + s.n * s.D + c)) * share);
    }
}

// Add to g(q) the gradient through the pooling. A query can be in several cells if they do not divide the grid evenly.
template <class E, class T>
void pool_backward(const Problem& p, const Kernel::Task& task) {
  if (!p.h) return;
  const Sizes s(p);
  const auto head = lay_out<BackwardHead<E>>(p, task.head);
  for (int64_t row = larger(task.begin, p.prefix()); row < task.end; row++) {
    const int64_t y = (row - p.prefix()) / p.W, x = (row - p.prefix()) % p.W;
    T* to = row_of<T>(p, p.dq, task.head_index, row);
    for (int64_t i = y * p.h / p.H; i < p.h && i * p.H / p.h <= y; i++)
      for (int64_t j = x * p.w / p.W; j < p.w && j * p.W / p.w <= x; j++) {
        const float* from = head.contrast.values + (i * p.w + j) * s.D;
        for (int64_t c = 0; c < s.d; c += lanes)
          store_first(to + c, s.d - c, load_first(to + c, s.d - c) + load(from + c));
      }
  }
}

}  // namespace
}  // namespace lineardiff::LINEARDIFF_ISA
