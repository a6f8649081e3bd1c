// Runs the kernel of one instruction set without PyTorch, under tools that check memory accesses: odd shapes, forward
// and backward, compared with float64 loops. Every tensor and buffer is a heap block of exactly its size, and the gaps
// between strided rows are poisoned for AddressSanitizer. test_kernel_memory.py runs it; by hand, in
// src/lineardiff/ops/csrc:
//
//   DRIVER=../../../../tests/ops/kernel_driver.cpp
//   g++ -std=c++20 -O1 -g -fsanitize=address,undefined -mavx2 -mfma -I. $DRIVER kernel_avx2.cpp -o driver
//
// Link any of the three objects, and run it on a CPU that has the instructions or in an emulator. The driver must then
// be compiled separately: -mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma are for kernel_avx512.cpp only, and with
// -mavx512bf16 for kernel_avx512bf16.cpp only.
//
// driver ISA [every=K] [short=NAME] [unset]
//   every=K     run every K-th case only
//   short=NAME  plant a fault: the tensor or buffer NAME (q, dpos, saved, head, scratch, ...) lacks its last element
//   unset       leave memory uninitialized instead of filling it with NaN, for valgrind, which tracks it
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "schedule.h"

extern "C" [[gnu::weak]] void __asan_poison_memory_region(const volatile void*, size_t);

// Null if the object is not linked.
namespace lineardiff::avx2 {
[[gnu::weak]] const Kernel* kernel(bool);
}
namespace lineardiff::avx512 {
[[gnu::weak]] const Kernel* kernel(bool);
}
namespace lineardiff::avx512bf16 {
[[gnu::weak]] const Kernel* kernel(bool);
}

using namespace lineardiff;
namespace {

std::string short_name;
bool unset = false;

// ---- memory

struct Block {
  Block(const std::string& name, size_t bytes, size_t element = 4) : size(bytes - (name == short_name ? element : 0)) {
    if (posix_memalign((void**)&data, 64, size)) abort();
    if (!unset) memset(data, 0xff, size);
  }
  Block(const Block&) = delete;
  ~Block() { free(data); }
  size_t size;
  char* data = nullptr;
};

struct Tensor {  // (B, heads, rows, d), float32 or bfloat16; elements are indexed as if it were contiguous
  Tensor(const std::string& name, int64_t B, int64_t heads, int64_t rows, int64_t d, bool bfloat16 = false,
         bool rows_apart = false, bool one_for_the_batch = false)
      : heads(heads), rows(rows), d(d), count(B * heads * rows * d), element(bfloat16 ? 2 : 4) {
    const int64_t apart = d / 8 * 8 + 16;  // a multiple of AddressSanitizer's granules
    batch = one_for_the_batch ? 0 : heads * rows * d, head = rows * d, row = d;
    if (rows_apart) batch = rows * heads * apart, head = apart, row = heads * apart;
    block.emplace(name, offset(count - 1) + element, element);
    for (int64_t i = 0; rows_apart && __asan_poison_memory_region && i < count / d - 1; i++)
      __asan_poison_memory_region(block->data + (i * apart + d) * element, (apart - d) * element);
  }
  size_t offset(int64_t i) const {
    return (i / d / rows / heads * batch + i / d / rows % heads * head + i / d % rows * row + i % d) * element;
  }
  double get(int64_t i) const {
    uint32_t bits = 0;
    if (offset(i) < block->size) memcpy((char*)&bits + 4 - element, block->data + offset(i), element);
    return std::bit_cast<float>(bits);
  }
  void put(int64_t i, double x) {
    uint32_t bits = std::bit_cast<uint32_t>(float(x));
    if (element == 2) bits += 0x7fff + (bits >> 16 & 1);
    if (offset(i) < block->size) memcpy(block->data + offset(i), (char*)&bits + 4 - element, element);
  }

  int64_t heads, rows, d, count, batch, head, row;  // the last three are strides
  size_t element;
  std::optional<Block> block;
};

// Like `run` of schedule.h, but one head after the other, and with memory of exactly the requested size, for each chunk
// too.
void run_exactly(const Kernel::Pass& pass, const Problem& p, int64_t threads) {
  const Chunks chunks(p, threads);
  const Kernel::Bytes bytes = pass.bytes(p);
  for (int64_t i = 0; i < p.all_heads(); i++) {
    Block head("head", bytes.head), parts("parts", chunks.count * bytes.part);
    for (int phase = 0; phase < pass.phase_count; phase++) {
      const auto [run, by_chunk] = pass.phases[phase];
      Block scratch("scratch", bytes.scratch);
      if (!by_chunk) run(p, {i, 0, p.N, chunks.count, head.data, parts.data, scratch.data});
      for (int64_t chunk = 0; by_chunk && chunk < chunks.count; chunk++) {
        Block part("part", bytes.part);
        char* in_parts = parts.data + chunk * bytes.part;
        const size_t size = std::min<size_t>(part.size, parts.data + parts.size - in_parts);
        memcpy(part.data, in_parts, size);
        run(p, {i, chunks.start(chunk), chunks.start(chunk + 1), chunks.count, head.data, part.data, scratch.data});
        memcpy(in_parts, part.data, size);
      }
    }
  }
}

// ---- one head in float64, from the equations

// A number and the sum of the squares of its terms, from which follows the error to allow where the terms cancel.
struct Sum {
  Sum(double x = 0) : x(x), squares(x * x) {}
  Sum(double x, double squares) : x(x), squares(squares) {}
  double x, squares;
};
Sum operator*(Sum a, Sum b) { return {a.x * b.x, a.squares * b.squares}; }
Sum operator+(Sum a, Sum b) { return {a.x + b.x, a.squares + b.squares}; }
Sum operator-(Sum a, Sum b) { return {a.x - b.x, a.squares + b.squares}; }

template <class T>
struct Matrix {
  Matrix(int64_t rows, int64_t columns) : rows(rows), columns(columns), numbers(rows * columns) {}
  T& operator()(int64_t i, int64_t j) { return numbers[i * columns + j]; }
  T operator()(int64_t i, int64_t j) const { return numbers[i * columns + j]; }
  Matrix<T> transposed() const {
    Matrix<T> to(columns, rows);
    for (size_t i = 0; i < numbers.size(); i++) to.numbers[i % columns * rows + i / columns] = numbers[i];
    return to;
  }
  int64_t rows, columns;
  std::vector<T> numbers;
};
using Numbers = Matrix<double>;
using Sums = Matrix<Sum>;

// scale A B
template <class A, class B>
auto product(double scale, const Matrix<A>& a, const Matrix<B>& b) {
  Matrix<decltype(A() * B())> c(a.rows, b.columns);
  for (int64_t i = 0; i < a.rows; i++)
    for (int64_t k = 0; k < a.columns; k++) {
      const A x = scale * a(i, k);
      for (int64_t j = 0; j < b.columns; j++) c(i, j) = c(i, j) + x * b(k, j);
    }
  return c;
}

// Softmax over each group of `width` consecutive numbers.
Numbers softmax(Numbers x, int64_t width) {
  for (double* row = x.numbers.data(); row != x.numbers.data() + x.numbers.size(); row += width) {
    double highest = *std::max_element(row, row + width), sum = 0;
    for (int64_t j = 0; j < width; j++) sum += row[j] = std::exp(row[j] - highest);
    for (int64_t j = 0; j < width; j++) row[j] /= sum;
  }
  return x;
}
Sums softmax_backward(const Numbers& p, Sums g, int64_t width) {
  for (size_t row = 0; row < p.numbers.size(); row += width) {
    Sum along;
    for (size_t j = row; j < row + width; j++) along = along + p.numbers[j] * g.numbers[j];
    for (size_t j = row; j < row + width; j++) g.numbers[j] = p.numbers[j] * (g.numbers[j] - along);
  }
  return g;
}

std::vector<double> inverse_rms(const Numbers& x, double eps) {
  std::vector<double> of_rows(x.rows, eps);
  for (size_t i = 0; i < x.numbers.size(); i++) of_rows[i / x.columns] += x.numbers[i] * x.numbers[i] / x.columns;
  for (double& y : of_rows) y = 1 / std::sqrt(y);
  return of_rows;
}
Numbers norm(Numbers x, const float* gain, double eps) {
  const std::vector<double> inverse = inverse_rms(x, eps);
  for (size_t i = 0; i < x.numbers.size(); i++) x.numbers[i] *= inverse[i / x.columns] * gain[i % x.columns];
  return x;
}
Sums norm_backward(Numbers x, const auto& g, const float* gain, double eps, Sum* gain_gradient) {
  const std::vector<double> inverse = inverse_rms(x, eps);
  const size_t d = x.columns;
  std::vector<Sum> along(x.rows);
  Sums to(x.rows, x.columns);
  for (size_t i = 0; i < x.numbers.size(); i++) {
    x.numbers[i] *= inverse[i / d];
    gain_gradient[i % d] = gain_gradient[i % d] + g.numbers[i] * x.numbers[i];
    along[i / d] = along[i / d] + gain[i % d] * g.numbers[i] * (x.numbers[i] / double(d));
  }
  for (size_t i = 0; i < x.numbers.size(); i++)
    to.numbers[i] = inverse[i / d] * (gain[i % d] * g.numbers[i] - along[i / d] * x.numbers[i]);
  return to;
}

// Call f(token, query, share) for each query that a contrast token averages, as in adaptive average pooling.
void each_in_cells(const Problem& p, auto f) {
  for (int64_t i = 0; i < p.n && p.h; i++) {
    const int64_t y = i / p.w, x = i % p.w, top = y * p.H / p.h, left = x * p.W / p.w;
    const int64_t height = ((y + 1) * p.H + p.h - 1) / p.h - top, width = ((x + 1) * p.W + p.w - 1) / p.w - left;
    for (int64_t j = 0; j < height * width; j++)
      f(i, p.prefix() + (top + j / width) * p.W + left + j % width, 1.0 / double(height * width));
  }
}

// The output and the gradients by name. load(names...) returns this head's part of the named tensors, stacked.
std::map<std::string, std::vector<Sum>> one_head(const Problem& p, auto load) {
  Numbers q = load("q"), k = load("k"), v = load("v"), t = load("pos", "neg");
  const int64_t N = p.N, n = p.n, d = p.d, width = p.joint ? 2 * n : n;
  const double scale = 1 / std::sqrt(double(d));
  each_in_cells(p, [&](int64_t i, int64_t row, double share) {
    for (int64_t c = 0; c < 2 * d; c++) t(c < d ? i : n + i, c % d) += share * q(row, c % d);
  });

  const Numbers reading = softmax(product(scale, t, k.transposed()), N), read = product(1, reading, v);
  Numbers u(n, d), signed_attention(N, n);
  for (int64_t i = 0; i < n * d; i++) u.numbers[i] = read.numbers[i] - p.lambda1 * read.numbers[n * d + i];
  const Numbers contrast = norm(u, p.gain1, p.eps);
  const Numbers attention = softmax(product(scale, q, t.transposed()), width);
  for (int64_t j = 0; j < N; j++)
    for (int64_t i = 0; i < n; i++) signed_attention(j, i) = attention(j, i) - p.lambda2 * attention(j, n + i);
  const Numbers w = product(1, signed_attention, contrast), out = norm(w, p.gain2, p.eps);

  Sums sums(1, 2 * d + 2), g_attention(N, 2 * n), g_read(2 * n, d);
  Sum *g_lambda1 = &sums(0, 2 * d), *g_lambda2 = g_lambda1 + 1;
  const Sums g_w = norm_backward(w, load("grad"), p.gain2, p.eps, &sums(0, d));
  const Sums g_signed = product(1, g_w, contrast.transposed());
  const Sums g_contrast = product(1, signed_attention.transposed(), g_w);
  for (int64_t j = 0; j < N; j++)
    for (int64_t i = 0; i < n; i++) {
      g_attention(j, i) = g_signed(j, i);
      g_attention(j, n + i) = -p.lambda2 * g_signed(j, i);
      *g_lambda2 = *g_lambda2 - attention(j, n + i) * g_signed(j, i);
    }
  const Sums g_scores2 = softmax_backward(attention, g_attention, width);
  const Sums g_u = norm_backward(u, g_contrast, p.gain1, p.eps, &sums(0, 0));
  for (int64_t i = 0; i < n * d; i++) {
    g_read.numbers[i] = g_u.numbers[i];
    g_read.numbers[n * d + i] = -p.lambda1 * g_u.numbers[i];
    *g_lambda1 = *g_lambda1 - g_u.numbers[i] * read.numbers[n * d + i];
  }
  const Sums g_scores1 = softmax_backward(reading, product(1, g_read, v.transposed()), N);
  Sums dq = product(scale, g_scores2, t), dt = product(scale, g_scores2.transposed(), q);
  const Sums stage1 = product(scale, g_scores1, k);
  for (int64_t i = 0; i < 2 * n * d; i++) dt.numbers[i] = dt.numbers[i] + stage1.numbers[i];
  each_in_cells(p, [&](int64_t i, int64_t row, double share) {
    for (int64_t c = 0; c < 2 * d; c++) dq(row, c % d) = dq(row, c % d) + share * dt(c < d ? i : n + i, c % d);
  });
  const auto half = dt.numbers.begin() + n * d;
  return {{"out", {out.numbers.begin(), out.numbers.end()}},
          {"dq", dq.numbers},
          {"dk", product(scale, g_scores1.transposed(), t).numbers},
          {"dv", product(1, reading.transposed(), g_read).numbers},
          {"dpos", {dt.numbers.begin(), half}},
          {"dneg", {half, dt.numbers.end()}},
          {"sums", sums.numbers}};
}

// Describe the errors of a case; an empty string if there are none.
std::string faults(const Kernel& kernel, Problem p, int64_t threads, bool rows_apart, double size, double allowed) {
  std::map<std::string, Tensor> tensors;
  std::mt19937 random(unsigned(p.d * 1009 + p.n * 31 + p.N));
  auto make = [&](const char* name, double low, double high, auto... arguments) {
    Tensor& made = tensors.try_emplace(name, name, arguments...).first->second;
    for (int64_t i = 0; i < made.count && low < high; i++) made.put(i, low + (high - low) * random() / 0x1p32);
    return View{made.block->data, made.batch, made.head, made.row};
  };
  auto image = [&](const char* name, double size) {
    return make(name, -size, size, p.B, p.heads, p.N, p.d, p.bfloat16, rows_apart);
  };
  auto token = [&](const char* name, double size) {
    return make(name, -size, size, p.B, p.heads, p.n, p.d, p.tokens_bfloat16, false, p.h && size > 0);
  };
  auto floats = [&](auto... arguments) { return static_cast<float*>(make(arguments...).data); };
  p.q = image("q", size), p.k = image("k", size), p.v = image("v", 1.5), p.grad = image("grad", 1.5);
  p.out = image("out", 0), p.dq = image("dq", 0), p.dk = image("dk", 0), p.dv = image("dv", 0);
  p.pos = token("pos", size), p.neg = token("neg", size), p.dpos = token("dpos", 0), p.dneg = token("dneg", 0);
  p.gain1 = floats("gain1", 0.5, 1.5, 1, 1, 1, p.d), p.gain2 = floats("gain2", 0.5, 1.5, 1, 1, 1, p.d);
  p.sums = floats("sums", 0., 0., p.B, p.heads, 1, 2 * p.d + 2);
  run_exactly(kernel.forward, p, threads);  // without `saved`, as at inference
  p.saved = floats("saved", 0., 0., p.B, p.heads, 2 * p.n, p.d + 2);
  run_exactly(kernel.forward, p, threads);
  run_exactly(kernel.backward, p, threads);
  std::string found;
  std::map<std::string, std::vector<Sum>> exact;
  for (int64_t i = 0; i < p.all_heads(); i++) {
    auto load = [&](auto... names) {
      Numbers part(0, p.d);
      for (const char* name : {names...}) {
        const Tensor& whole = tensors.at(name);
        for (int64_t j = 0; j < whole.rows * p.d; j++) part.numbers.push_back(whole.get(i * whole.rows * p.d + j));
        part.rows += whole.rows;
      }
      return part;
    };
    for (auto& [name, sums] : one_head(p, load)) exact[name].insert(exact[name].end(), sums.begin(), sums.end());
  }
  for (auto& [name, sums] : exact) {
    const Tensor& tensor = tensors.at(name);
    double difference = 0, norm = 0, squares = 0;
    for (int64_t i = 0; i < tensor.count; i++)
      difference += std::pow(tensor.get(i) - sums[i].x, 2), norm += std::pow(sums[i].x, 2), squares += sums[i].squares;
    const double error = difference == 0 ? 0 : std::sqrt(difference / std::max(norm, squares));
    if (!(error <= allowed + (tensor.element == 2 ? 1 / 256.0 : 0)))  // or the rounding of bfloat16
      found += ", error of " + name + " " + std::to_string(error);
  }
  return found;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string isa = count > 1 ? arguments[1] : "";
  size_t every = 1;
  for (std::string option : std::vector<std::string>(arguments + std::min(count, 2), arguments + count)) {
    if (option.starts_with("every=")) every = std::stoul(option.substr(6));
    if (option.starts_with("short=")) short_name = option.substr(6);
    if (option == "unset") unset = true;
  }
  std::map<std::string, const Kernel* (*)(bool)> kernels{
      {"avx2", &avx2::kernel}, {"avx512", &avx512::kernel}, {"avx512bf16", &avx512bf16::kernel}};
  if (!kernels[isa])
    return printf("'%s' is none of avx2, avx512, avx512bf16, or its object is not linked\n", isa.c_str()), 2;
  size_t made = 0, run = 0, failed = 0;
  std::mt19937 random(0);
  auto test = [&](int64_t N, int64_t d, int64_t n, int64_t threads, bool bfloat16) {
    const Kernel* kernel = kernels[isa](bfloat16);
    const unsigned r = random() >> 8;  // the options that the shapes do not fix
    auto bit = [r](int i) { return (r >> i & 1) != 0; };
    Problem p{};
    p.B = n * N < 1000 ? 1 + bit(0) : 1, p.heads = n * N < 1000 || threads > 1 ? 1 + bit(1) : 1;
    p.N = N, p.d = d, p.n = n, p.bfloat16 = bfloat16, p.tokens_bfloat16 = bfloat16 && bit(2), p.joint = bit(3);
    // a single token's A = P+ - l2 P- could be nearly 0, and RMSNorm would magnify its rounding
    p.lambda1 = 0.3f, p.lambda2 = n == 1 ? -0.6f : 0.6f, p.eps = 1e-5f;
    const int64_t h = n == 128 ? 8 : std::lround(std::sqrt(double(n))), w = n / h;
    const int64_t W = std::max(w, int64_t(std::sqrt(double(N)))), H = N / W;
    if (bit(4) && H >= h)  // cells overlap where they do not divide the grid; what is left over of N is a prefix
      p.H = H, p.W = W, p.h = h, p.w = w;
    if (made++ % every != 0 || !kernel) return;
    const bool sharp = bit(6) && bit(7);  // scores up to 60, whose own rounding moves the exponentials by 4e-6
    const double allowed = isa == "avx512bf16" ? 3e-2 : sharp ? 3e-5 : 1e-5;
    const std::string found = faults(*kernel, p, threads, bit(5), sharp ? 6 : 1.5, allowed);
    run++, failed += !found.empty();
    if (!found.empty()) printf("case %zu: N %ld d %ld n %ld options %x%s\n", made - 1, N, d, n, r & 255, found.c_str());
  };
  for (int64_t d : {3, 7, 24, 40, 64, 72, 80})
    for (int64_t n : {1, 9, 81, 128})
      for (int64_t N : {1, 5, 50, 130, 197})
        for (bool bfloat16 : {false, true})
          if (n * N < 10000 || d == 24 || d == 72) test(N, d, n, 1, bfloat16);
  for (int64_t N : {301, 400})  // several chunks to a head
    for (int64_t d : {7, 64})
      for (int i = 0; i < 8; i++) test(N, d, 9, 3, i % 2);
  printf("%zu cases, %zu failed\n", run, failed);
  return failed != 0;
}
