// The interface between the torch operators and the CUDA kernels: asynchronous on a stream of the current device, whose
// memory every pointer of a task is in. std::runtime_error where a launch fails.
#pragma once

#include "../common/tasks.h"

namespace unirl {
namespace cuda {

using StreamHandle = void*;

void record_rows(const RecordTask& task, StreamHandle stream);
void gradient_rows(const GradientTask& task, StreamHandle stream);
void token_losses(const TokenTask& task, StreamHandle stream);
void policy_rows(const PolicyTask& task, StreamHandle stream);

// Multiplies logits that hold their gradient, padding included, by *factor of the device.
void scale_gradient(const Logits& logits, const float* factor, StreamHandle stream);

// Whether a row of this many columns fits the shared memory of a cluster, as policy_rows needs.
bool row_fits(int64_t columns, bool bfloat16);

}  // namespace cuda
}  // namespace unirl
