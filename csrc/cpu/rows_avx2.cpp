#define UNIRL_ISA avx2
#define UNIRL_LANES 8
#include "rows.inl"

namespace unirl {
const RowKernels avx2_kernels = {avx2::record, avx2::gradient, avx2::tokens, avx2::policy};
}
