// The interface between the parts of the kernel: the problem, and the table of functions of one instruction set.
// Independent of PyTorch and of any instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

namespace lineardiff {

// A tensor (B, heads, rows, d) with unit last stride. Strides count elements; a stride of 0 broadcasts.
struct View {
  void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;
};

// The arguments of the op. Names and shapes as in lineardiff.visual_contrast_attention.
struct Problem {
  int64_t B, heads, N, d, n;
  bool bfloat16;  // type of q, k, v, out and their gradients; float32 otherwise
  bool joint;     // stage II has one softmax over the 2n tokens
  View q, k, v;
  View pos, neg;         // t+ and t-; with pooling, the embeddings e+ and e-
  bool tokens_bfloat16;  // type of pos, neg and their gradients
  int64_t H, W, h, w;    // h > 0: the last H*W queries are averaged into h x w cells; t = average + embedding
  float lambda1, lambda2, eps;
  const float *gain1, *gain2;  // (d,), with the constant (1 - lambda_init) multiplied in

  View out;
  // For the backward pass, (B, heads, 2n, d + 2): v+ or v- of each token, its maximum and 1 / its sum. May be null.
  float* saved;

  View grad, dq, dk, dv, dpos, dneg;  // backward only
  float* sums;                        // backward only, (B * heads, 2d + 2): gradients of gain1, gain2, lambda1, lambda2

  int64_t all_heads() const { return B * heads; }
  int64_t prefix() const { return N - H * W; }
};

// See conv.h: out = added + the depth-wise convolution of the last H * W values on their grid.
struct Convolution {
  int64_t B, heads, N, d, H, W;
  View values, added, out;
  const float *weight, *bias;  // (9, heads * d), (heads * d); bias may be null
};

// A head is processed in phases. Some phases split its queries or keys into chunks, which several threads can share.
struct Kernel {
  struct Bytes {  // memory per head, per chunk of a head and per thread, each aligned to 64 bytes
    size_t head, part, scratch;
  };
  struct Task {                      // one phase of one head, or of one chunk of its rows (queries or keys)
    int64_t head_index, begin, end;  // rows [begin, end); begin is a multiple of 16
    int64_t chunks;                  // number of chunks of the head
    void *head, *part, *scratch;     // part: of this chunk; in a phase by head, the first of `chunks` consecutive parts
  };
  struct Phase {
    void (*run)(const Problem&, const Task&);
    bool by_chunk;
  };
  struct Pass {
    Bytes (*bytes)(const Problem&);
    int phase_count;
    Phase phases[6];
  };
  Pass forward, backward;

  int64_t lanes;  // elements per vector
  void (*convolve_row)(const Convolution&, int64_t image, int64_t y);
  void (*pass_prefix)(const Convolution&, int64_t image);
  void (*weight_backward)(const Convolution&, int64_t head, int64_t channel, float* weight, float* bias);
};

// Return null if the instruction set has no kernel for the type.
namespace avx2 {
const Kernel* kernel(bool bfloat16);
}
namespace avx512 {
const Kernel* kernel(bool bfloat16);
}
namespace avx512bf16 {
const Kernel* kernel(bool bfloat16);
}

}  // namespace lineardiff
