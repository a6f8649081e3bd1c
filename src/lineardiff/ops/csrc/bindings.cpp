// The kernel's ops on PyTorch's stable ABI: one library works with every Python and every PyTorch since 2.10.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <string>
#include <tuple>
#include <vector>

#include "schedule.h"

namespace lineardiff {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// ---- instruction sets

struct Isa {
  const char* name;
  bool (*supported)();
  const Kernel* (*kernel)(bool bfloat16);
};

// Each requires the one before it.
constexpr Isa isas[] = {
    {"AVX2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }, avx2::kernel},
    {"AVX-512",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
     },
     avx512::kernel},
    {"AVX-512 with bfloat16", [] { return bool(__builtin_cpu_supports("avx512bf16")); }, avx512bf16::kernel},
};
std::atomic<size_t> usable_isas{std::size(isas)};

size_t supported_isas() {
  __builtin_cpu_init();
  size_t count = 0;
  while (count < usable_isas && isas[count].supported()) count++;
  return count;
}

// The name of the best instruction set of this CPU, or "" if it has none of them. A `limit` excludes better ones from
// now on, for tests; "" changes nothing.
std::string isa(std::string limit) {
  if (!limit.empty()) {
    const auto found = std::find_if(isas, std::end(isas), [&](const Isa& x) { return x.name == limit; });
    STD_TORCH_CHECK(found != std::end(isas), "lineardiff: unknown instruction set ", limit);
    usable_isas = found - isas + 1;
  }
  const size_t count = supported_isas();
  return count ? isas[count - 1].name : "";
}

const Kernel& kernel_for(bool bfloat16) {
  for (size_t i = supported_isas(); i-- > 0;)
    if (const Kernel* kernel = isas[i].kernel(bfloat16)) return *kernel;
  STD_TORCH_CHECK(false, "lineardiff: this CPU has no AVX2");
}

void parallel(int64_t count, const auto& f) { torch::stable::parallel_for(0, count, 1, f); }

// ---- tensors

bool is_bfloat16(const Tensor& x) { return x.scalar_type() == ScalarType::BFloat16; }

Tensor unit_last_stride(const Tensor& x) {
  return x.stride(3) == 1 || x.size(3) == 1 ? x : torch::stable::contiguous(x);
}

View view(const Tensor& x) { return {const_cast<void*>(x.const_data_ptr()), x.stride(0), x.stride(1), x.stride(2)}; }

// Laid out as (B, N, heads, d), like the output of a projection, so that joining the heads needs no copy.
Tensor joined_heads(const Tensor& like) {
  return torch::stable::transpose(
      torch::stable::new_empty(like, {like.size(0), like.size(2), like.size(1), like.size(3)}), 1, 2);
}

Tensor new_float32(const Tensor& like, std::vector<int64_t> sizes) {
  return torch::stable::new_empty(like, sizes, ScalarType::Float);
}

void check(bool holds, const char* what) { STD_TORCH_CHECK(holds, "lineardiff: ", what); }

struct Arguments {
  Tensor q, k, v, pos, neg, lambda1, lambda2, gain1, gain2;
  double eps;
  bool joint;
  std::vector<int64_t> pool;

  // Python has already reported a caller's mistakes; these checks keep the kernel from accessing memory out of bounds.
  Problem problem() {
    for (const Tensor* x : {&q, &k, &v, &pos, &neg}) check(x->dim() == 4, "q, k, v, pos and neg must have four axes");
    Problem p{};
    p.B = q.size(0), p.heads = q.size(1), p.N = q.size(2), p.d = q.size(3), p.n = pos.size(2);
    p.bfloat16 = is_bfloat16(q);
    p.tokens_bfloat16 = is_bfloat16(pos);
    for (const Tensor* x : {&q, &k, &v}) {
      check(is_bfloat16(*x) == p.bfloat16 && (p.bfloat16 || x->scalar_type() == ScalarType::Float),
            "q, k and v must all be float32 or all be bfloat16");
      for (int axis = 0; axis < 4; axis++) check(x->size(axis) == q.size(axis), "q, k and v must have the same shape");
    }
    for (const Tensor* x : {&pos, &neg}) {
      check(is_bfloat16(*x) == p.tokens_bfloat16 && (p.tokens_bfloat16 || x->scalar_type() == ScalarType::Float),
            "pos and neg must both be float32 or both be bfloat16");
      check(x->size(0) == p.B && x->size(1) == p.heads && x->size(2) == p.n && x->size(3) == p.d,
            "pos and neg must have shape (B, heads, n, d)");
    }
    for (const Tensor* x : {&lambda1, &lambda2, &gain1, &gain2})
      check(x->scalar_type() == ScalarType::Float && x->is_contiguous(),
            "lambdas and gains must be contiguous float32");
    check(lambda1.numel() == 1 && lambda2.numel() == 1, "lambdas must have one element each");
    check(gain1.numel() == p.d && gain2.numel() == p.d, "gains must have shape (d,)");
    check(pool.empty() || pool.size() == 4, "pool must be empty or (H, W, h, w)");
    if (!pool.empty()) {
      p.H = pool[0], p.W = pool[1], p.h = pool[2], p.w = pool[3];
      check(p.h > 0 && p.w > 0 && p.h * p.w == p.n && p.H >= p.h && p.W >= p.w && p.H * p.W <= p.N,
            "the grids of pool must fit N and n");
    }
    for (Tensor* x : {&q, &k, &v, &pos, &neg}) *x = unit_last_stride(*x);
    p.q = view(q), p.k = view(k), p.v = view(v), p.pos = view(pos), p.neg = view(neg);
    p.joint = joint;
    p.lambda1 = *static_cast<const float*>(lambda1.const_data_ptr());
    p.lambda2 = *static_cast<const float*>(lambda2.const_data_ptr());
    p.gain1 = static_cast<const float*>(gain1.const_data_ptr());
    p.gain2 = static_cast<const float*>(gain2.const_data_ptr());
    p.eps = float(eps);
    return p;
  }
};

bool nothing_to_do(const Problem& p) { return p.B * p.heads * p.N * p.d * p.n == 0; }

// ---- ops

std::tuple<Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, Tensor pos, Tensor neg, Tensor lambda1, Tensor lambda2,
                                   Tensor gain1, Tensor gain2, double eps, bool joint, std::vector<int64_t> pool,
                                   bool save) {
  Arguments a{q, k, v, pos, neg, lambda1, lambda2, gain1, gain2, eps, joint, pool};
  Problem p = a.problem();
  Tensor out = joined_heads(q), saved = new_float32(q, {p.B, p.heads, 2 * p.n, save ? p.d + 2 : 0});
  p.out = view(out);
  p.saved = save ? static_cast<float*>(saved.mutable_data_ptr()) : nullptr;
  check(!nothing_to_do(p) || out.numel() == 0, "there must be a contrast token");
  if (!nothing_to_do(p))
    run(kernel_for(p.bfloat16).forward, p, torch::stable::get_num_threads(),
        [](int64_t n, const auto& f) { parallel(n, f); });
  return {out, saved};
}

// Gradients of q, k, v, pos and neg; and, summed over batch and heads, (2d + 2,), of gain1, gain2, lambda1 and lambda2.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(Tensor grad, Tensor q, Tensor k, Tensor v,
                                                                    Tensor pos, Tensor neg, Tensor lambda1,
                                                                    Tensor lambda2, Tensor gain1, Tensor gain2,
                                                                    Tensor saved, double eps, bool joint,
                                                                    std::vector<int64_t> pool) {
  Arguments a{q, k, v, pos, neg, lambda1, lambda2, gain1, gain2, eps, joint, pool};
  Problem p = a.problem();
  check(saved.scalar_type() == ScalarType::Float && saved.is_contiguous() &&
            saved.numel() == p.all_heads() * 2 * p.n * (p.d + 2),
        "saved must be what the forward pass saved");
  check(grad.dim() == 4 && grad.scalar_type() == q.scalar_type(), "grad must have the shape and type of the output");
  for (int axis = 0; axis < 4; axis++)
    check(grad.size(axis) == q.size(axis), "grad must have the shape and type of the output");
  grad = unit_last_stride(grad);
  Tensor dq = joined_heads(q), dk = joined_heads(q), dv = joined_heads(q);
  Tensor dpos = torch::stable::new_empty(pos, {p.B, p.heads, p.n, p.d}), dneg = torch::stable::empty_like(dpos);
  Tensor sums = new_float32(q, {p.all_heads(), 2 * p.d + 2}), total = new_float32(q, {2 * p.d + 2});
  p.grad = view(grad), p.dq = view(dq), p.dk = view(dk), p.dv = view(dv), p.dpos = view(dpos), p.dneg = view(dneg);
  p.saved = static_cast<float*>(saved.mutable_data_ptr());
  p.sums = static_cast<float*>(sums.mutable_data_ptr());
  if (!nothing_to_do(p))
    run(kernel_for(p.bfloat16).backward, p, torch::stable::get_num_threads(),
        [](int64_t n, const auto& f) { parallel(n, f); });
  else
    torch::stable::zero_(dpos), torch::stable::zero_(dneg);
  float* result = static_cast<float*>(total.mutable_data_ptr());
  for (int64_t c = 0; c < 2 * p.d + 2; c++) {
    double sum = 0;
    for (int64_t i = 0; i < (nothing_to_do(p) ? 0 : p.all_heads()); i++) sum += p.sums[i * (2 * p.d + 2) + c];
    result[c] = float(sum);
  }
  return {dq, dk, dv, dpos, dneg, total};
}

// ---- the convolution

struct ConvolutionArguments {
  Tensor values, added, weight;
  int64_t H, W;

  Convolution convolution() {
    check(values.dim() == 4 && added.dim() == 4 && values.scalar_type() == added.scalar_type() &&
              (is_bfloat16(values) || values.scalar_type() == ScalarType::Float),
          "values and added must have shape (B, heads, N, d) and both be float32 or both be bfloat16");
    for (int axis = 0; axis < 4; axis++)
      check(values.size(axis) == added.size(axis), "values and added must have the same shape");
    Convolution c{};
    c.B = values.size(0), c.heads = values.size(1), c.N = values.size(2), c.d = values.size(3), c.H = H, c.W = W;
    check(H > 0 && W > 0 && H * W <= c.N, "the grid must fit N");
    check(weight.scalar_type() == ScalarType::Float && weight.is_contiguous() && weight.numel() == 9 * c.heads * c.d,
          "weight must be contiguous float32 of shape (C, 1, 3, 3)");
    values = unit_last_stride(values), added = unit_last_stride(added);
    c.values = view(values), c.added = view(added);
    return c;
  }

  // (9, C) from (C, 1, 3, 3); `rotated` by 180 degrees, for the gradient of the values.
  std::vector<float> by_tap(bool rotated) const {
    const float* from = static_cast<const float*>(weight.const_data_ptr());
    const int64_t C = weight.numel() / 9;
    std::vector<float> to(9 * C);
    for (int64_t c = 0; c < C; c++)
      for (int64_t k = 0; k < 9; k++) to[(rotated ? 8 - k : k) * C + c] = from[9 * c + k];
    return to;
  }
};

void convolve(const Kernel& kernel, const Convolution& c) {
  parallel(c.B * (c.H + 1), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++) {
      const int64_t image = task / (c.H + 1), y = task % (c.H + 1);
      if (y < c.H)
        kernel.convolve_row(c, image, y);
      else
        kernel.pass_prefix(c, image);
    }
  });
}

void add_value_conv_to(Tensor out, Tensor added, Tensor values, Tensor weight, Tensor bias, int64_t H, int64_t W) {
  ConvolutionArguments a{values, added, weight, H, W};
  Convolution c = a.convolution();
  check(bias.scalar_type() == ScalarType::Float && bias.is_contiguous() && bias.numel() == c.heads * c.d,
        "bias must be contiguous float32 of shape (C,)");
  const std::vector<float> taps = a.by_tap(false);
  c.out = view(out);
  c.weight = taps.data();
  c.bias = static_cast<const float*>(bias.const_data_ptr());
  convolve(kernel_for(is_bfloat16(values)), c);
}

Tensor add_value_conv(Tensor added, Tensor values, Tensor weight, Tensor bias, int64_t H, int64_t W) {
  Tensor out = joined_heads(values);
  add_value_conv_to(out, added, values, weight, bias, H, W);
  return out;
}

void add_value_conv_(Tensor added, Tensor values, Tensor weight, Tensor bias, int64_t H, int64_t W) {
  check(added.dim() == 4 && added.stride(3) == 1, "added must have unit last stride");
  add_value_conv_to(added, added, values, weight, bias, H, W);
}

// Gradients of the values, the weight and the bias.
std::tuple<Tensor, Tensor, Tensor> value_conv_backward(Tensor grad, Tensor values, Tensor weight, int64_t H,
                                                       int64_t W) {
  ConvolutionArguments a{values, grad, weight, H, W};
  Convolution c = a.convolution();
  const Kernel& kernel = kernel_for(is_bfloat16(values));
  const int64_t C = c.heads * c.d, vectors = (c.d + kernel.lanes - 1) / kernel.lanes;
  Tensor dvalues = joined_heads(values), dweight = torch::stable::empty_like(weight), dbias = new_float32(values, {C});
  std::vector<float> taps(9 * C);
  float* sums = static_cast<float*>(dbias.mutable_data_ptr());
  parallel(c.heads * vectors, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++)
      kernel.weight_backward(c, task / vectors, task % vectors * kernel.lanes, taps.data(), sums);
  });
  float* to = static_cast<float*>(dweight.mutable_data_ptr());
  for (int64_t channel = 0; channel < C; channel++)
    for (int64_t k = 0; k < 9; k++) to[9 * channel + k] = taps[k * C + channel];

  const std::vector<float> rotated = a.by_tap(true);
  c.values = c.added, c.added = View{}, c.out = view(dvalues), c.weight = rotated.data();
  convolve(kernel, c);
  return {dvalues, dweight, dbias};
}

}  // namespace
}  // namespace lineardiff

STABLE_TORCH_LIBRARY(lineardiff, m) {
  m.def(
      "vca_forward(Tensor q, Tensor k, Tensor v, Tensor pos, Tensor neg, Tensor lambda1, Tensor lambda2, Tensor gain1, "
      "Tensor gain2, float eps, bool joint, SymInt[] pool, bool save) -> (Tensor, Tensor)");
  m.def(
      "vca_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor pos, Tensor neg, Tensor lambda1, Tensor lambda2, "
      "Tensor gain1, Tensor gain2, Tensor saved, float eps, bool joint, SymInt[] pool) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("add_value_conv(Tensor added, Tensor values, Tensor weight, Tensor bias, SymInt H, SymInt W) -> Tensor");
  m.def("add_value_conv_(Tensor(a!) added, Tensor values, Tensor weight, Tensor bias, SymInt H, SymInt W) -> ()");
  m.def(
      "value_conv_backward(Tensor grad, Tensor values, Tensor weight, SymInt H, SymInt W) -> (Tensor, Tensor, Tensor)");
  m.def("kernel_isa(str limit) -> str");
}
STABLE_TORCH_LIBRARY_IMPL(lineardiff, CPU, m) {
  m.impl("vca_forward", TORCH_BOX(&lineardiff::forward));
  m.impl("vca_backward", TORCH_BOX(&lineardiff::backward));
  m.impl("add_value_conv", TORCH_BOX(&lineardiff::add_value_conv));
  m.impl("add_value_conv_", TORCH_BOX(&lineardiff::add_value_conv_));
  m.impl("value_conv_backward", TORCH_BOX(&lineardiff::value_conv_backward));
}
STABLE_TORCH_LIBRARY_IMPL(lineardiff, CompositeExplicitAutograd, m) {
  m.impl("kernel_isa", TORCH_BOX(&lineardiff::isa));
}
