// torch operators unirl_cuda::*, on torch's stable ABI; no CUDA header is needed, so this builds against any torch.
// The caller makes the tensors' device current and says on which of its streams to run.
//
// The emulation (csrc/emulation) has the same operators for CPU tensors, under another name.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "../common/torch_tasks.h"
#include "rows.h"

#if !defined(UNIRL_OPERATORS)
#define UNIRL_OPERATORS unirl_cuda
#define UNIRL_DEVICE_KEY CUDA
#endif

namespace {

using torch::stable::Tensor;

unirl::cuda::StreamHandle handle(int64_t stream) { return reinterpret_cast<unirl::cuda::StreamHandle>(stream); }

void row_records(Tensor logits, Tensor targets, int64_t columns, double temperature, Tensor record, int64_t stream) {
  unirl::cuda::record_rows(unirl::record_task(logits, targets, columns, temperature, record), handle(stream));
}

void write_gradient(Tensor logits, Tensor targets, int64_t columns, double temperature, Tensor rows, int64_t stream) {
  unirl::cuda::gradient_rows(unirl::gradient_task(logits, targets, columns, temperature, rows), handle(stream));
}

void token_losses(int64_t kind, std::vector<double> constants, Tensor terms, Tensor result, int64_t stream) {
  unirl::cuda::token_losses(unirl::token_task(kind, constants, terms, result), handle(stream));
}

void policy_rows(Tensor logits, Tensor targets, int64_t columns, double temperature, int64_t kind,
                 std::vector<double> constants, Tensor terms, Tensor record, Tensor result, int64_t stream) {
  const auto rows = unirl::record_task(logits, targets, columns, temperature, record);
  unirl::cuda::policy_rows(unirl::policy_task(rows, kind, constants, terms, result), handle(stream));
}

void scale_gradient(Tensor logits, Tensor factor, int64_t stream) {
  const bool one_float = factor.numel() == 1 && factor.scalar_type() == unirl::ScalarType::Float;
  STD_TORCH_CHECK(one_float, "factor must be one float32");
  const auto shape = unirl::logits_of(logits, logits.size(1));
  unirl::cuda::scale_gradient(shape, static_cast<const float*>(factor.data_ptr()), handle(stream));
}

bool row_fits(int64_t columns, bool bfloat16) { return unirl::cuda::row_fits(columns, bfloat16); }

}  // namespace

STABLE_TORCH_LIBRARY(UNIRL_OPERATORS, m) {
  m.def("row_records(Tensor logits, Tensor targets, int columns, float temperature, Tensor(a!) record, int stream) "
        "-> ()");
  m.def("write_gradient(Tensor(a!) logits, Tensor targets, int columns, float temperature, Tensor rows, int stream) "
        "-> ()");
  m.def("token_losses(int kind, float[] constants, Tensor terms, Tensor(a!) result, int stream) -> ()");
  m.def("policy_rows(Tensor(a!) logits, Tensor targets, int columns, float temperature, int kind, float[] constants, "
        "Tensor terms, Tensor(b!) record, Tensor(c!) result, int stream) -> ()");
  m.def("scale_gradient(Tensor(a!) logits, Tensor factor, int stream) -> ()");
  m.def("row_fits(int columns, bool bfloat16) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(UNIRL_OPERATORS, UNIRL_DEVICE_KEY, m) {
  m.impl("row_records", TORCH_BOX(&row_records));
  m.impl("write_gradient", TORCH_BOX(&write_gradient));
  m.impl("token_losses", TORCH_BOX(&token_losses));
  m.impl("policy_rows", TORCH_BOX(&policy_rows));
  m.impl("scale_gradient", TORCH_BOX(&scale_gradient));
}

STABLE_TORCH_LIBRARY_IMPL(UNIRL_OPERATORS, CompositeExplicitAutograd, m) { m.impl("row_fits", TORCH_BOX(&row_fits)); }
