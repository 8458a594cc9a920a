#define UNIRL_ISA generic
#define UNIRL_LANES 4
#include "rows.inl"

namespace unirl {
const RowKernels generic_kernels = {generic::record, generic::gradient, generic::tokens, generic::policy};
}
