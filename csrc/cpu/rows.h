// The interface between the bindings and the row kernels, which are compiled once per instruction set.
#pragma once

#include <stdint.h>

namespace unirl {

// Logits [rows, width] of float32, or of bfloat16 as uint16; the first `columns` of each row are real, the rest padding.
struct Logits {
  void* data;
  int64_t rows, width, stride, columns;
  bool bfloat16;
};

struct RecordTask {
  Logits logits;
  const int64_t* targets;  // [rows] columns, -1 where another shard holds the target
  double temperature;
  double* record;  // [3 or 4, rows]: maximum, sum, target, shift
  bool with_shift;
};

struct GradientTask {
  Logits logits;  // overwritten
  const int64_t* targets;
  double temperature;
  const double* rows;  // [5, rows]: peak, total, entropy, gradient of logp, gradient of the entropy
};

struct RowKernels {
  void (*record)(const RecordTask&, int64_t first, int64_t last);
  void (*gradient)(const GradientTask&, int64_t first, int64_t last);
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
