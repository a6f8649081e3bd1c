// What the parts of the kernel agree on: the problem, and the table of functions of one instruction set.
// Nothing here knows PyTorch or an instruction set.
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
  bool joint;     // one softmax over the 2n tokens in stage II
  View q, k, v;
  View pos, neg;         // t+ and t-, or, with pooling, the embeddings e+ and e-
  bool tokens_bfloat16;  // type of pos, neg and their gradients
  int64_t H, W, h, w;    // h > 0: the last H*W queries are averaged into h x w cells; t = average + embedding
  float lambda1, lambda2, eps;
  const float *gain1, *gain2;  // (d,), with the constant (1 - lambda_init) multiplied in

  View out;
  float* saved;  // for the backward pass, (B, heads, 2n, d + 2): what each token read, its maximum, 1 / its sum; may be
                 // null

  View grad, dq, dk, dv, dpos, dneg;  // backward only
  float* sums;                        // backward only, (B * heads, 2d + 2): gradients of gain1, gain2, lambda1, lambda2

  int64_t all_heads() const { return B * heads; }
  int64_t prefix() const { return N - H * W; }
};

// Of conv.h: out = added + depth-wise convolution of the grid that the last H * W values form.
struct Convolution {
  int64_t B, heads, N, d, H, W;
  View values, added, out;
  const float *weight, *bias;  // (9, heads * d), (heads * d); bias may be null
};

// One head is worked on in phases; within some, its queries or keys are cut into chunks for several threads.
struct Kernel {
  struct Bytes {  // of one head, of one chunk of one head, of one thread; the memory is aligned to 64 bytes
    size_t head, part, scratch;
  };
  struct Rows {  // queries or keys [begin, end) of a head; begin is a multiple of 16
    int64_t head_index, begin, end;
  };
  struct Phase {
    // `part` is that of the chunk, or, in a phase by whole heads, the first of the `chunks` parts of the head
    void (*run)(const Problem&, Rows, int64_t chunks, void* head, void* part, void* scratch);
    bool by_chunk;
  };
  struct Pass {
    Bytes (*bytes)(const Problem&);
    int phase_count;
    Phase phases[6];
  };
  Pass forward, backward;

  int64_t lanes;  // numbers of a vector
  void (*convolve_row)(const Convolution&, int64_t image, int64_t y);
  void (*pass_prefix)(const Convolution&, int64_t image);
  void (*weight_backward)(const Convolution&, int64_t head, int64_t channel, float* weight, float* bias);
};

// Null where the object has no kernel for the type.
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
