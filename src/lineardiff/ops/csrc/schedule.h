// Work on all heads with several threads. parallel(count, f) calls f(begin, end) over [0, count) from several threads.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <new>

#include "kernel.h"

namespace lineardiff {

// Grows, and is kept by its thread: fresh memory costs more than the arithmetic of a head.
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

// Heads are the tasks where they fill the threads evenly. Otherwise the rows of a head are cut into chunks, and `head`
// and `part` memory is shared by the threads.
class Chunks {
 public:
  Chunks(const Problem& p, int64_t threads) : N_(p.N) {
    const int64_t heads = p.all_heads();
    whole = heads >= 4 * threads || heads % threads == 0;
    if (!whole) count = std::max<int64_t>(1, std::min((4 * threads + heads - 1) / heads, p.N / 128));
  }
  Kernel::Rows rows(int64_t head_index, int64_t chunk) const { return {head_index, start(chunk), start(chunk + 1)}; }
  bool whole;
  int64_t count = 1;  // chunks of a head

 private:
  int64_t start(int64_t chunk) const { return chunk == count ? N_ : N_ * chunk / count / 16 * 16; }
  int64_t N_;
};

template <class Parallel>
void run(const Kernel::Pass& pass, const Problem& p, int64_t threads, const Parallel& parallel) {
  const Chunks chunks(p, threads);
  const Kernel::Bytes bytes = pass.bytes(p);
  const int64_t heads = p.all_heads();
  const auto phases_end = pass.phases + pass.phase_count;
  if (chunks.whole) {
    parallel(heads, [&](int64_t begin, int64_t end) {
      char* head = thread_buffer().get(bytes.head + bytes.part + bytes.scratch);
      for (int64_t i = begin; i < end; i++)
        for (auto phase = pass.phases; phase < phases_end; phase++)
          phase->run(p, {i, 0, p.N}, 1, head, head + bytes.head, head + bytes.head + bytes.part);
    });
    return;
  }
  Buffer shared;
  char* head = shared.get(heads * (bytes.head + chunks.count * bytes.part));
  char* parts = head + heads * bytes.head;
  for (auto phase = pass.phases; phase < phases_end; phase++) {
    const int64_t tasks_of_head = phase->by_chunk ? chunks.count : 1;
    parallel(heads * tasks_of_head, [&](int64_t begin, int64_t end) {
      char* scratch = thread_buffer().get(bytes.scratch);
      for (int64_t task = begin; task < end; task++) {
        const int64_t i = task / tasks_of_head, chunk = task % tasks_of_head;
        const Kernel::Rows rows = phase->by_chunk ? chunks.rows(i, chunk) : Kernel::Rows{i, 0, p.N};
        phase->run(p, rows, chunks.count, head + i * bytes.head, parts + (i * chunks.count + chunk) * bytes.part,
                   scratch);
      }
    });
  }
}

}  // namespace lineardiff
