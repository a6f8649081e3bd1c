// The functions of one instruction set for one element type, in the order in which the schedule calls them.
#pragma once
#include "backward.h"
#include "conv.h"

namespace lineardiff::LINEARDIFF_ISA {
namespace {

template <class E, class T>
const Kernel* table() {
  constexpr bool by_chunk = true, by_head = false;
  static const Kernel kernel{{forward_bytes<E>,
                              4,
                              {{gather_tokens<E, T>, by_head},
                               {global_contrast<E, T>, by_chunk},
                               {merge_contrast<E>, by_head},
                               {patchwise<E, T>, by_chunk}}},
                             {backward_bytes<E>,
                              6,
                              {{restore<E, T>, by_head},
                               {patchwise_backward<E, T>, by_chunk},
                               {merge_contrast_backward<E>, by_head},
                               {global_contrast_backward<E, T>, by_chunk},
                               {merge_tokens_backward<E>, by_head},
                               {pool_backward<E, T>, by_chunk}}},
                             lanes,
                             convolve_row<T>,
                             pass_prefix<T>,
                             weight_backward<T>};
  return &kernel;
}

}  // namespace
}  // namespace lineardiff::LINEARDIFF_ISA
