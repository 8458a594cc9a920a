// torch operators unirl_cuda::*, on torch's stable ABI; no CUDA header is needed, so this builds against any torch.
// The caller makes the tensors' device current and says on which of its streams to run.
//
// Built with UNIRL_EMULATED, the same operators take CPU tensors (csrc/emulation).
#include <torch/csrc/stable/library.h>

#include <vector>

#include "../common/torch_tasks.h"
#include "rows.h"

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

bool row_fits(int64_t columns, bool bfloat16) { return unirl::cuda::row_fits(columns, bfloat16); }

}  // namespace

STABLE_TORCH_LIBRARY(unirl_cuda, m) {
  m.def("row_records(Tensor logits, Tensor targets, int columns, float temperature, Tensor(a!) record, int stream) "
        "-> ()");
  m.def("write_gradient(Tensor(a!) logits, Tensor targets, int columns, float temperature, Tensor rows, int stream) "
        "-> ()");
  m.def("token_losses(int kind, float[] constants, Tensor terms, Tensor(a!) result, int stream) -> ()");
  m.def("policy_rows(Tensor(a!) logits, Tensor targets, int columns, float temperature, int kind, float[] constants, "
        "Tensor terms, Tensor(b!) record, Tensor(c!) result, int stream) -> ()");
  m.def("row_fits(int columns, bool bfloat16) -> bool");
}

#if defined(UNIRL_EMULATED)
STABLE_TORCH_LIBRARY_IMPL(unirl_cuda, CPU, m) {
#else
STABLE_TORCH_LIBRARY_IMPL(unirl_cuda, CUDA, m) {
#endif
  m.impl("row_records", TORCH_BOX(&row_records));
  m.impl("write_gradient", TORCH_BOX(&write_gradient));
  m.impl("token_losses", TORCH_BOX(&token_losses));
  m.impl("policy_rows", TORCH_BOX(&policy_rows));
}

STABLE_TORCH_LIBRARY_IMPL(unirl_cuda, CompositeExplicitAutograd, m) { m.impl("row_fits", TORCH_BOX(&row_fits)); }
