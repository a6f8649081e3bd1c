// The functions of one instruction set for one type, as the schedule calls them.
#pragma once
#include "backward.h"
#include "conv.h"

namespace lineardiff::LINEARDIFF_ISA {
namespace {

template <class E, class T>
const Kernel* table() {
  using P = const Problem&;
  using R = Kernel::Rows;
  static const Kernel kernel{
      {forward_bytes<E>,
       4,
       {{[](P p, R r, int64_t, void* head, void*, void*) { tokens<E, T>(p, r.head_index, head); }, false},
        {[](P p, R r, int64_t, void* head, void* part, void* scratch) { stage1<E, T>(p, r, head, part, scratch); },
         true},
        {[](P p, R r, int64_t chunks, void* head, void* parts, void*) {
           contrast<E>(p, r.head_index, chunks, head, parts);
         },
         false},
        {[](P p, R r, int64_t, void* head, void*, void* scratch) { stage2<E, T>(p, r, head, scratch); }, true}}},
      {backward_bytes<E>,
       6,
       {{[](P p, R r, int64_t, void* head, void*, void*) { restore<E, T>(p, r.head_index, head); }, false},
        {[](P p, R r, int64_t, void* head, void* part, void* scratch) {
           stage2_backward<E, T>(p, r, head, part, scratch);
         },
         true},
        {[](P p, R r, int64_t chunks, void* head, void* parts, void*) {
           contrast_backward<E>(p, r.head_index, chunks, head, parts);
         },
         false},
        {[](P p, R r, int64_t, void* head, void* part, void* scratch) {
           stage1_backward<E, T>(p, r, head, part, scratch);
         },
         true},
        {[](P p, R r, int64_t chunks, void* head, void* parts, void*) {
           tokens_backward<E>(p, r.head_index, chunks, head, parts);
         },
         false},
        {[](P p, R r, int64_t, void* head, void*, void*) { pool_backward<E, T>(p, r, head); }, true}}},
      lanes,
      convolve_row<T>,
      pass_prefix<T>,
      weight_backward<T>};
  return &kernel;
}

}  // namespace
}  // namespace lineardiff::LINEARDIFF_ISA
