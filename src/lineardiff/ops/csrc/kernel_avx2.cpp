#define LINEARDIFF_ISA avx2
#define LINEARDIFF_AVX512 0
#define LINEARDIFF_BF16 0
#include "table.h"

namespace lineardiff::avx2 {

const Kernel* kernel(bool bfloat16_type) {
  return bfloat16_type ? table<Float32, bfloat16>() : table<Float32, float>();
}

}  // namespace lineardiff::avx2
