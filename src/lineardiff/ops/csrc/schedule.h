// Distributes the heads over threads. parallel(count, f) calls f(begin, end) on ranges that partition [0, count), from
// several threads.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <new>

#include "kernel.h"

namespace lineardiff {

// A buffer that only grows. Each thread keeps one: page faults on fresh memory cost more than the arithmetic of a head.
class Buffer {
 public:
  char* get(size_t bytes) {
    if (bytes > capacity_) {
      std::free(memory_);
      capacity_ = (bytes + 4095) / 4096 * 4096;
      memory_ = static_cast<char*>(std::aligned_alloc(4096, capacity_));
      if (!memory_) {
        capacity_ = 0;
        throw std::bad_alloc();
      }
    }
    return memory_;
  }
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(memory_); }

 private:
  char* memory_ = nullptr;
  size_t capacity_ = 0;
};

inline Buffer& thread_buffer() {
  static thread_local Buffer buffer;
  return buffer;
}

// How the work is divided among threads. A head is one task where that balances the load: threads then idle for less
// than a fifth of the time (4 or more heads per thread) or never (a multiple of the threads). Otherwise the rows of a
// head are split, so that there are about 4 tasks per thread, and the threads share the `head` and `part` memory. A
// chunk has at least 128 rows, because merging its partial sums costs as much as 2n more rows, and starts at a multiple
// of 16, the widest vector, so that only the last vector of a head is incomplete.
class Chunks {
 public:
  Chunks(const Problem& p, int64_t threads) : N_(p.N) {
    const int64_t heads = p.all_heads();
    by_head = heads >= 4 * threads || heads % threads == 0;
    if (!by_head) count = std::max<int64_t>(1, std::min((4 * threads + heads - 1) / heads, p.N / 128));
  }
  int64_t start(int64_t chunk) const { return chunk == count ? N_ : N_ * chunk / count / 16 * 16; }
  bool by_head;
  int64_t count = 1;  // chunks per head

 private:
  int64_t N_;
};

template <class Parallel>
void run(const Kernel::Pass& pass, const Problem& p, int64_t threads, const Parallel& parallel) {
  const Chunks chunks(p, threads);
  const Kernel::Bytes bytes = pass.bytes(p);
  const int64_t heads = p.all_heads();
  const auto phases_end = pass.phases + pass.phase_count;
  if (chunks.by_head) {
    parallel(heads, [&](int64_t begin, int64_t end) {
      char* head = thread_buffer().get(bytes.head + bytes.part + bytes.scratch);
      for (int64_t i = begin; i < end; i++)
        for (auto phase = pass.phases; phase < phases_end; phase++)
          phase->run(p, {i, 0, p.N, 1, head, head + bytes.head, head + bytes.head + bytes.part});
    });
    return;
  }
  Buffer shared;
  char* head = shared.get(heads * (bytes.head + chunks.count * bytes.part));
  char* parts = head + heads * bytes.head;
  for (auto phase = pass.phases; phase < phases_end; phase++) {
    const int64_t tasks_per_head = phase->by_chunk ? chunks.count : 1;
    parallel(heads * tasks_per_head, [&](int64_t begin, int64_t end) {
      char* scratch = thread_buffer().get(bytes.scratch);
      for (int64_t task = begin; task < end; task++) {
        const int64_t i = task / tasks_per_head, chunk = task % tasks_per_head;
        const int64_t row = phase->by_chunk ? chunks.start(chunk) : 0;
        const int64_t row_end = phase->by_chunk ? chunks.start(chunk + 1) : p.N;
        phase->run(p, {i, row, row_end, chunks.count, head + i * bytes.head,
                       parts + (i * chunks.count + chunk) * bytes.part, scratch});
      }
    });
  }
}

}  // namespace lineardiff
