// The backward pass of one head. Scores and softmaxes are computed again, block by block, so that memory stays linear;
// what stage I read from the values is saved by the forward pass. Written g(x) for the gradient of x, s = 1 / sqrt d:
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
  BackwardHead(const Problem& p, Arena arena) : Head<E>(p, arena) {
    const Sizes s(p);
    arena.take(Head<E>::bytes / 4);
    difference = arena.operand<E>(s.n, s.D);
    dots = arena.take(s.n2);
    statistics = arena.take(2 * s.n2);
    bytes = arena.used();
  }
  Operand<E> difference;  // g(u)
  float* dots;            // g(u) . v+, g(u) . v-
  float* statistics;      // maximum and 1 / sum of each token in stage I, one after the other
  size_t bytes;
};

struct BackwardPart {  // sums over a chunk of the queries, then of the keys
  BackwardPart(const Problem& p, Arena arena) {
    const Sizes s(p);
    tokens = arena.take(s.n2 * s.D);
    contrast = arena.take(s.n * s.D);
    gain2 = arena.take(s.D);
    lambda2 = arena.take(lanes);
    bytes = arena.used();
  }
  float *tokens, *contrast;  // g(T), g(v^)
  float *gain2, *lambda2;
  size_t bytes;
};

template <class E>
struct BackwardScratch {
  BackwardScratch(const Problem& p, Arena arena) {
    const Sizes s(p);
    turned = arena.take(s.words<E>(s.d) * block);
    scores = arena.operand<E>(s.n2, block);
    attention = arena.operand<E>(s.n, block);
    product = arena.take(s.n * block);
    read = arena.operand<E>(block, s.D);
    pairs = arena.take((block + 2) * s.D);
    bytes = arena.used();
  }
  float* turned;
  Operand<E> scores;     // (2n, block): S, the softmaxes, g(S)
  Operand<E> attention;  // (n, block): A in stage II, P+ - l1 P- in stage I
  float* product;        // (n, block): g(A) in stage II, g(u) v^T in stage I
  Operand<E> read;       // (block, D): w, then g(w) in stage II; g(q), g(k), g(v) on their way out
  float* pairs;          // (block, D): queries or keys as pairs
  size_t bytes;
};

template <class E, class T>
void restore(const Problem& p, int64_t head_index, void* head_memory) {
  const Sizes s(p);
  const BackwardHead<E> head(p, Arena(head_memory));
  gather_tokens<E, T>(p, head_index, head.tokens);
  fill_pairs(head.tokens, s.n2, s.D);
  for (int64_t i = 0; i < s.n2; i++) {
    const float* saved = p.saved + (head_index * s.n2 + i) * (s.d + 2) + s.d;
    head.statistics[i] = saved[0];
    head.statistics[s.n2 + i] = saved[1];
  }
  norm_contrast(p, p.saved + head_index * s.n2 * (s.d + 2), s.d + 2, head.contrast);
  fill_rows(head.contrast, s.n, s.D);
}

// Rows (m, d) of a product, converted, into a gradient.
template <class E, class T>
INLINE void write(const Problem& p, const View& view, int64_t head_index, int64_t row, int64_t m, const float* from) {
  const Sizes s(p);
  T* to = row_of<T>(p, view, head_index, row);
  for (int64_t i = 0; i < m; i++, to += view.row) {
    for (int64_t c = 0; c < s.d; c += lanes) store_first(to + c, s.d - c, load(from + i * s.D + c));
  }
}

// g(w) from w and g(o), in place; adds to g(gain2).
template <class E, class T>
void norm_backward(const Problem& p, Kernel::Rows queries, int64_t row, int64_t m, const Operand<E>& w, float* gain2) {
  const Sizes s(p);
  const T* g = row_of<T>(p, p.grad, queries.head_index, row);
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

// From g(A) in `product` and the softmaxes' numerators in `scores`: A, g(S) and the sum of -g(l2).
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
void stage2_backward(const Problem& p, Kernel::Rows queries, void* head_memory, void* part_memory, void* scratch) {
  const Sizes s(p);
  const BackwardHead<E> head(p, Arena(head_memory));
  const BackwardPart part(p, Arena(part_memory));
  const BackwardScratch<E> t(p, Arena(scratch));
  memset(part_memory, 0, part.bytes);
  for_blocks(queries.begin, queries.end, [&](int64_t row, int64_t m, int64_t padded) {
    const int64_t K = s.words<E>(m), columns = s.D / lanes;
    fetch(row_of<T>(p, p.grad, queries.head_index, row), p.grad.row, m, s.d);
    score<E, T>(p, p.q, queries.head_index, row, m, padded, head.tokens.rows, t.turned, t.scores.values);
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
    if (m < padded)  // so that no product along the queries sees the padding
      for (int64_t i = 0; i < s.n; i++) {
        float* last = t.attention.values + i * block + padded - lanes;
        store(last, first(m - padded + lanes, load(last), set(0)));
      }
    fill_pairs(t.attention, s.n, block);
    fill_rows(t.attention, s.n, block);
    multiply<E, true>(m, columns, s.words<E>(s.n), t.attention.pairs, block, head.contrast.pairs, s.D, t.read.values,
                      s.D);
    norm_backward<E, T>(p, queries, row, m, t.read, part.gain2);

    fill_rows(t.read, m, s.D);
    fill_pairs(t.read, m, s.D);
    if constexpr (E::pack == 1)
      transpose<E>(t.read.rows, s.D, m, s.d, t.turned, block, padded);
    else
      transpose<E>((const bfloat16*)t.read.rows, s.D, m, s.d, t.turned, block, padded);
    multiply<E, false>(s.n, padded / lanes, s.words<E>(s.d), head.contrast.rows, s.D / E::pack, t.turned, block,
                       t.product, block);
    attention_backward(p, padded, t, part.lambda2);
    if (row + m < queries.end)
      fetch(row_of<T>(p, p.q, queries.head_index, row + m), p.q.row, smaller(block, queries.end - row - m), s.d);
    fetch(row_of<T>(p, p.dq, queries.head_index, row), p.dq.row, m, s.d);
    multiply<E, false, true>(s.n, columns, K, t.attention.rows, block / E::pack, t.read.pairs, s.D, part.contrast, s.D);

    fill_rows(t.scores, s.n2, block);
    fill_pairs(t.scores, s.n2, block);
    to_pairs<E>(row_of<T>(p, p.q, queries.head_index, row), p.q.row, m, s.d, t.pairs, s.D);
    multiply<E, false, true>(s.n2, columns, K, t.scores.rows, block / E::pack, t.pairs, s.D, part.tokens, s.D);
    multiply<E, true>(m, columns, s.words<E>(s.n2), t.scores.pairs, block, head.tokens.pairs, s.D, t.read.values, s.D);
    write<E, T>(p, p.dq, queries.head_index, row, m, t.read.values);
  });
}

INLINE void accumulate(float* to, const float* from, int64_t count) {
  for (int64_t c = 0; c < count; c += lanes) store(to + c, load(to + c) + load(from + c));
}

// Merges g(v^) of the chunks; from it g(u), g(gain1), g(l1).
template <class E>
void contrast_backward(const Problem& p, int64_t head_index, int64_t chunks, void* head_memory, void* parts) {
  const Sizes s(p);
  const BackwardHead<E> head(p, Arena(head_memory));
  const BackwardPart total(p, Arena(parts));
  for (int64_t chunk = 1; chunk < chunks; chunk++) {
    const BackwardPart part(p, Arena((char*)parts + chunk * total.bytes));
    accumulate(total.contrast, part.contrast, s.n * s.D);
    accumulate(total.gain2, part.gain2, s.D);
    accumulate(total.lambda2, part.lambda2, lanes);
  }
  float *gain1 = p.sums + head_index * (2 * s.d + 2), *gain2 = gain1 + s.d, *lambdas = gain2 + s.d;
  memset(gain1, 0, 4 * (2 * s.d + 2));
  memcpy(gain2, total.gain2, 4 * s.d);
  lambdas[1] = sum_of_lanes(load(total.lambda2));
  for (int64_t i = 0; i < s.n; i++) {
    const float* plus = p.saved + (head_index * s.n2 + i) * (s.d + 2);
    const float* minus = plus + s.n * (s.d + 2);
    const float* g = total.contrast + i * s.D;
    float* du = head.difference.values + i * s.D;
    Vector along = set(0);
    contrast_row(p, plus, minus, [&](int64_t c, Vector u, float) {
      along = fma(load(g + c) * load_first(p.gain1 + c, s.d - c), u, along);
    });
    const float mean = sum_of_lanes(along) / float(s.d);
    Vector dot_plus = set(0), dot_minus = set(0);
    contrast_row(p, plus, minus, [&](int64_t c, Vector u, float inverse) {
      const int64_t count = s.d - c;
      const Vector scale = set(inverse), gain = load_first(p.gain1 + c, count);
      const Vector x = scale * (load(g + c) * gain - set(mean * inverse * inverse) * u);
      store_first(gain1 + c, count, fma(load(g + c) * scale, u, load_first(gain1 + c, count)));
      store(du + c, x);
      dot_plus = fma(x, load_first(plus + c, count), dot_plus);
      dot_minus = fma(x, load_first(minus + c, count), dot_minus);
    });
    head.dots[i] = sum_of_lanes(dot_plus);
    head.dots[s.n + i] = sum_of_lanes(dot_minus);
    lambdas[0] -= head.dots[s.n + i];
  }
  fill_rows(head.difference, s.n, s.D);
  fill_pairs(head.difference, s.n, s.D);
}

template <class E, class T>
void stage1_backward(const Problem& p, Kernel::Rows keys, void* head_memory, void* part_memory, void* scratch) {
  const Sizes s(p);
  const BackwardHead<E> head(p, Arena(head_memory));
  const BackwardPart part(p, Arena(part_memory));
  const BackwardScratch<E> t(p, Arena(scratch));
  const Vector log_scale = set(score_scale(p)), scale = set(1 / __builtin_sqrtf(float(s.d)));
  const Vector negative = set(-p.lambda1);
  for_blocks(keys.begin, keys.end, [&](int64_t row, int64_t m, int64_t padded) {
    const int64_t columns = s.D / lanes;
    fetch(row_of<T>(p, p.k, keys.head_index, row), p.k.row, m, s.d);
    transpose<E>(row_of<T>(p, p.v, keys.head_index, row), p.v.row, m, s.d, t.turned, block, padded);
    multiply<E, false>(s.n, padded / lanes, s.words<E>(s.d), head.difference.rows, s.D / E::pack, t.turned, block,
                       t.product, block);
    score<E, T>(p, p.k, keys.head_index, row, m, padded, head.tokens.rows, t.turned, t.scores.values);
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
    if (row + m < keys.end)
      fetch(row_of<T>(p, p.v, keys.head_index, row + m), p.v.row, smaller(block, keys.end - row - m), s.d);
    fetch(row_of<T>(p, p.dv, keys.head_index, row), p.dv.row, m, s.d);
    fetch(row_of<T>(p, p.dk, keys.head_index, row), p.dk.row, m, s.d);
    fill_pairs(t.attention, s.n, block);
    multiply<E, true>(m, columns, s.words<E>(s.n), t.attention.pairs, block, head.difference.pairs, s.D, t.read.values,
                      s.D);
    write<E, T>(p, p.dv, keys.head_index, row, m, t.read.values);

    fill_rows(t.scores, s.n2, block);
    fill_pairs(t.scores, s.n2, block);
    to_pairs<E>(row_of<T>(p, p.k, keys.head_index, row), p.k.row, m, s.d, t.pairs, s.D);
    multiply<E, false, true>(s.n2, columns, s.words<E>(m), t.scores.rows, block / E::pack, t.pairs, s.D, part.tokens,
                             s.D);
    multiply<E, true>(m, columns, s.words<E>(s.n2), t.scores.pairs, block, head.tokens.pairs, s.D, t.read.values, s.D);
    write<E, T>(p, p.dk, keys.head_index, row, m, t.read.values);
  });
}

// Merges g(T) of the chunks and writes it out. With pooling, leaves in the head what each query of a cell receives.
template <class E>
void tokens_backward(const Problem& p, int64_t head_index, int64_t chunks, void* head_memory, void* parts) {
  const Sizes s(p);
  const BackwardHead<E> head(p, Arena(head_memory));
  const BackwardPart total(p, Arena(parts));
  for (int64_t chunk = 1; chunk < chunks; chunk++) {
    const BackwardPart part(p, Arena((char*)parts + chunk * total.bytes));
    accumulate(total.tokens, part.tokens, s.n2 * s.D);
  }
  if (p.tokens_bfloat16) {
    write<E, bfloat16>(p, p.dpos, head_index, 0, s.n, total.tokens);
    write<E, bfloat16>(p, p.dneg, head_index, 0, s.n, total.tokens + s.n * s.D);
  } else {
    write<E, float>(p, p.dpos, head_index, 0, s.n, total.tokens);
    write<E, float>(p, p.dneg, head_index, 0, s.n, total.tokens + s.n * s.D);
  }
  if (p.h)
    for (int64_t i = 0; i < s.n; i++) {
      const Vector share = set(Cell(p, i).share());
      for (int64_t c = i * s.D; c < (i + 1) * s.D; c += lanes)
        store(head.contrast.values + c, (load(total.tokens + c) + load(total.tokens + s.n * s.D + c)) * share);
    }
}

// g(q) += what the cells that hold the query pass on. Cells overlap where they do not divide the grid.
template <class E, class T>
void pool_backward(const Problem& p, Kernel::Rows queries, void* head_memory) {
  if (!p.h) return;
  const Sizes s(p);
  const BackwardHead<E> head(p, Arena(head_memory));
  for (int64_t row = larger(queries.begin, p.prefix()); row < queries.end; row++) {
    const int64_t y = (row - p.prefix()) / p.W, x = (row - p.prefix()) % p.W;
    T* to = row_of<T>(p, p.dq, queries.head_index, row);
    for (int64_t i = y * p.h / p.H; i < p.h && i * p.H / p.h <= y; i++)
      for (int64_t j = x * p.w / p.W; j < p.w && j * p.W / p.w <= x; j++) {
        const float* from = head.contrast.values + (i * p.w + j) * s.D;
        for (int64_t c = 0; c < s.d; c += lanes)
          store_first(to + c, s.d - c, load_first(to + c, s.d - c) + load(from + c));
      }
  }
}

template <class E>
Kernel::Bytes backward_bytes(const Problem& p) {
  return {BackwardHead<E>(p, Arena(nullptr)).bytes, BackwardPart(p, Arena(nullptr)).bytes,
          BackwardScratch<E>(p, Arena(nullptr)).bytes};
}

}  // namespace
}  // namespace lineardiff::LINEARDIFF_ISA
