// The depth-wise 3 x 3 convolution of the values on their grid, which the paper adds to the attention's output. T is
// the type of the tensors; sums are float32. Lanes are channels; weights are (9, C), one row for each of the 9 taps.
// `out` may be `added` itself.
#pragma once
#include <type_traits>

#include "kernel.h"
#include "simd.h"

namespace lineardiff::LINEARDIFF_ISA {
namespace {

template <class T>
INLINE T* at(const View& view, int64_t image, int64_t head, int64_t row) {
  return (T*)view.data + image * view.batch + head * view.head + row * view.row;
}

// `count` channels of one row of the grid. `top` and `bottom`: there is a row above, below. `full`: `count` fills a
// vector.
template <class T, bool top, bool bottom, bool full>
INLINE void convolve_channels(const Convolution& c, const T* x, const T* added, T* out, const Vector* w, Vector bias,
                              int64_t count) {
  const int64_t across = c.values.row, down = c.W * across;
  auto convolved = [&](int64_t column, auto edge) {
    Vector sums[3] = {bias, set(0), set(0)};
    for (int ky = top ? 0 : 1; ky < (bottom ? 3 : 2); ky++)
      for (int kx = 0; kx < 3; kx++) {
        const int64_t other = column + kx - 1;
        if (edge && (other < 0 || other >= c.W)) continue;
        const T* value = x + (ky - 1) * down + other * across;
        sums[ky] = fma(w[3 * ky + kx], full ? load(value) : load_first(value, count), sums[ky]);
      }
    Vector sum = sums[0] + sums[1] + sums[2];
    if (added)
      sum = sum + (full ? load(added + column * c.added.row) : load_first(added + column * c.added.row, count));
    T* to = out + column * c.out.row;
    full ? store(to, sum) : store_first(to, count, sum);
  };
  convolved(0, std::true_type());
  for (int64_t column = 1; column + 1 < c.W; column++) convolved(column, std::false_type());
  if (c.W > 1) convolved(c.W - 1, std::true_type());
}

// One row of the grid of one image.
template <class T>
void convolve_row(const Convolution& c, int64_t image, int64_t y) {
  const int64_t row = c.N - c.H * c.W + y * c.W;
  for (int64_t head = 0; head < c.heads; head++)
    for (int64_t i = 0; i < c.d; i += lanes) {
      const int64_t channel = head * c.d + i, count = c.d - i;
      Vector w[9];
      for (int k = 0; k < 9; k++) w[k] = load_first(c.weight + k * c.heads * c.d + channel, count);
      const Vector bias = c.bias ? load_first(c.bias + channel, count) : set(0);
      const T* x = at<T>(c.values, image, head, row) + i;
      const T* added = c.added.data ? at<T>(c.added, image, head, row) + i : nullptr;
      T* out = at<T>(c.out, image, head, row) + i;
      auto run = [&](auto top, auto bottom) {
        if (count >= lanes)
          convolve_channels<T, top, bottom, true>(c, x, added, out, w, bias, count);
        else
          convolve_channels<T, top, bottom, false>(c, x, added, out, w, bias, count);
      };
      if (y > 0 && y + 1 < c.H) run(std::true_type(), std::true_type());
      if (y > 0 && y + 1 == c.H) run(std::true_type(), std::false_type());
      if (y == 0 && y + 1 < c.H) run(std::false_type(), std::true_type());
      if (y == 0 && y + 1 == c.H) run(std::false_type(), std::false_type());
    }
}

// Prefix tokens, which are not on the grid: `added`, or zero.
template <class T>
void pass_prefix(const Convolution& c, int64_t image) {
  for (int64_t head = 0; head < c.heads; head++)
    for (int64_t row = 0; row < c.N - c.H * c.W; row++)
      for (int64_t i = 0; i < c.d; i += lanes) {
        const Vector x = c.added.data ? load_first(at<T>(c.added, image, head, row) + i, c.d - i) : set(0);
        store_first(at<T>(c.out, image, head, row) + i, c.d - i, x);
      }
}

// Gradients of the weight (9, C) and the bias (C), for one vector of channels starting at channel i of a head. `added`
// is the gradient of the output.
template <class T>
void weight_backward(const Convolution& c, int64_t head, int64_t i, float* weight, float* bias) {
  const int64_t prefix = c.N - c.H * c.W, count = c.d - i, channel = head * c.d + i;
  Vector sums[9], sum = set(0);
  for (int k = 0; k < 9; k++) sums[k] = set(0);
  auto add = [&](const T* grad, const T* value, int64_t y, int64_t column, auto edge, auto full) {
    const Vector g = full ? load(grad) : load_first(grad, count);
    sum = sum + g;
    for (int ky = 0; ky < 3; ky++)
      for (int kx = 0; kx < 3; kx++) {
        const int64_t row = y + ky - 1, other = column + kx - 1;
        if (edge && (row < 0 || row >= c.H || other < 0 || other >= c.W)) continue;
        const T* near = value + ((ky - 1) * c.W + kx - 1) * c.values.row;
        sums[3 * ky + kx] = fma(g, full ? load(near) : load_first(near, count), sums[3 * ky + kx]);
      }
  };
  auto add_all = [&](auto full) {
    for (int64_t image = 0; image < c.B; image++)
      for (int64_t y = 0; y < c.H; y++) {
        const T* grad = at<T>(c.added, image, head, prefix + y * c.W) + i;
        const T* value = at<T>(c.values, image, head, prefix + y * c.W) + i;
        const bool inner = y > 0 && y + 1 < c.H;
        for (int64_t column = 0; column < c.W; column++, grad += c.added.row, value += c.values.row)
          if (inner && column > 0 && column + 1 < c.W)
            add(grad, value, y, column, std::false_type(), full);
          else
            add(grad, value, y, column, std::true_type(), full);
      }
  };
  count >= lanes ? add_all(std::true_type()) : add_all(std::false_type());
  for (int k = 0; k < 9; k++) store_first(weight + k * c.heads * c.d + channel, count, sums[k]);
  store_first(bias + channel, count, sum);
}

}  // namespace
}  // namespace lineardiff::LINEARDIFF_ISA
