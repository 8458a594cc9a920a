// torch operators unirl_cpu::*, on torch's stable ABI: one build serves every Python and every torch from 2.10 on.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <vector>

#include "../common/torch_tasks.h"
#include "rows.h"

namespace {

using torch::stable::Tensor;

constexpr int64_t kGrainElements = 1 << 16;  // fewer than this are not worth a thread of their own

template <class Task>
void for_rows(const Task& task, int64_t rows, int64_t width, void (*kernel)(const Task&, int64_t, int64_t)) {
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, width));
  torch::stable::parallel_for(0, rows, grain, [&](int64_t first, int64_t last) { kernel(task, first, last); });
}

const unirl::RowKernels& kernels() { return unirl::row_kernels(unirl::current_isa()); }

void row_records(Tensor logits, Tensor targets, int64_t columns, double temperature, Tensor record) {
  const auto task = unirl::record_task(logits, targets, columns, temperature, record);
  for_rows(task, task.logits.rows, task.logits.width, kernels().record);
}

void write_gradient(Tensor logits, Tensor targets, int64_t columns, double temperature, Tensor rows) {
  const auto task = unirl::gradient_task(logits, targets, columns, temperature, rows);
  for_rows(task, task.logits.rows, task.logits.width, kernels().gradient);
}

void token_losses(int64_t kind, std::vector<double> constants, Tensor terms, Tensor result) {
  const auto task = unirl::token_task(kind, constants, terms, result);
  for_rows(task, task.rows, 1, kernels().tokens);
}

void policy_rows(Tensor logits, Tensor targets, int64_t columns, double temperature, int64_t kind,
                 std::vector<double> constants, Tensor terms, Tensor record, Tensor result) {
  const auto rows = unirl::record_task(logits, targets, columns, temperature, record);
  const auto task = unirl::policy_task(rows, kind, constants, terms, result);
  for_rows(task, rows.logits.rows, rows.logits.width, kernels().policy);
}

int64_t isa_level() { return static_cast<int64_t>(unirl::current_isa()); }

}  // namespace

STABLE_TORCH_LIBRARY(unirl_cpu, m) {
  m.def("row_records(Tensor logits, Tensor targets, int columns, float temperature, Tensor(a!) record) -> ()");
  m.def("write_gradient(Tensor(a!) logits, Tensor targets, int columns, float temperature, Tensor rows) -> ()");
  m.def("token_losses(int kind, float[] constants, Tensor terms, Tensor(a!) result) -> ()");
  m.def("policy_rows(Tensor(a!) logits, Tensor targets, int columns, float temperature, int kind, float[] constants, "
        "Tensor terms, Tensor(b!) record, Tensor(c!) result) -> ()");
  m.def("isa_level() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(unirl_cpu, CPU, m) {
  m.impl("row_records", TORCH_BOX(&row_records));
  m.impl("write_gradient", TORCH_BOX(&write_gradient));
  m.impl("token_losses", TORCH_BOX(&token_losses));
  m.impl("policy_rows", TORCH_BOX(&policy_rows));
}

STABLE_TORCH_LIBRARY_IMPL(unirl_cpu, CompositeExplicitAutograd, m) { m.impl("isa_level", TORCH_BOX(&isa_level)); }
