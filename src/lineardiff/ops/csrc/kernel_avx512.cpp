#define LINEARDIFF_ISA avx512
#define LINEARDIFF_AVX512 1
#define LINEARDIFF_BF16 0
#include "table.h"

namespace lineardiff::avx512 {

const Kernel* kernel(bool bfloat16_type) {
  return bfloat16_type ? table<Float32, bfloat16>() : table<Float32, float>();
}

}  // namespace lineardiff::avx512
