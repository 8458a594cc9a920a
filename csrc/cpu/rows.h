// The interface between the bindings and the row kernels, which are compiled once per instruction set.
#pragma once

#include "../common/tasks.h"

namespace unirl {

struct RowKernels {
  void (*record)(const RecordTask&, int64_t first, int64_t last);
  void (*gradient)(const GradientTask&, int64_t first, int64_t last);
  void (*tokens)(const TokenTask&, int64_t first, int64_t last);
  void (*policy)(const PolicyTask&, int64_t first, int64_t last);
};

enum class Isa : int64_t { generic = 0, avx2 = 1, avx512 = 2 };

extern const RowKernels generic_kernels;
#if defined(UNIRL_X86)
extern const RowKernels avx2_kernels;
extern const RowKernels avx512_kernels;
#endif

// The best level of this machine, or the one that the environment variable UNIRL_CPU_ISA names.
Isa current_isa();
const RowKernels& row_kernels(Isa isa);

}  // namespace unirl
