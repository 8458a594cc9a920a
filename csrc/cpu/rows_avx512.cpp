#define UNIRL_ISA avx512
#define UNIRL_LANES 16
#include "rows.inl"

namespace unirl {
const RowKernels avx512_kernels = {avx512::record, avx512::gradient, avx512::tokens, avx512::policy};
}
