#define LINEARDIFF_ISA avx512bf16
#define LINEARDIFF_AVX512 1
#define LINEARDIFF_BF16 1
#include "table.h"

namespace lineardiff::avx512bf16 {

const Kernel* kernel(bool bfloat16_type) { return bfloat16_type ? table<BFloat16, bfloat16>() : nullptr; }

}  // namespace lineardiff::avx512bf16
