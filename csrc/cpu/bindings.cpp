// torch operators unirl_cpu::*, on torch's stable ABI: one build serves every Python and every torch from 2.10 on.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <vector>

#include "rows.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kGrainElements = 1 << 16;  // fewer than this are not worth a thread of their own

unirl::Logits logits_of(const Tensor& logits, int64_t columns) {
  const auto dtype = logits.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, "logits must be float32 or bfloat16");
  STD_TORCH_CHECK(logits.dim() == 2 && (logits.size(1) <= 1 || logits.stride(1) == 1), "logits must have dense rows");
  STD_TORCH_CHECK(0 <= columns && columns <= logits.size(1), "more real columns than columns");
  return {logits.data_ptr(), logits.size(0), logits.size(1), logits.stride(0), columns, dtype == ScalarType::BFloat16};
}

const int64_t* targets_of(const Tensor& targets, int64_t rows) {
  STD_TORCH_CHECK(targets.scalar_type() == ScalarType::Long && targets.is_contiguous() && targets.numel() == rows,
                  "targets must be contiguous int64, one per row");
  return static_cast<const int64_t*>(targets.data_ptr());
}

double* doubles_of(const Tensor& values, int64_t rows) {
  STD_TORCH_CHECK(values.scalar_type() == ScalarType::Double && values.is_contiguous() && values.dim() == 2 &&
                      values.size(1) == rows,
                  "per-row values must be contiguous float64 [n, rows]");
  return static_cast<double*>(values.data_ptr());
}

template <class Task>
void for_rows(const Task& task, int64_t rows, int64_t width, void (*kernel)(const Task&, int64_t, int64_t)) {
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, width));
  torch::stable::parallel_for(0, rows, grain, [&](int64_t first, int64_t last) { kernel(task, first, last); });
}

unirl::RecordTask record_task(const Tensor& logits, const Tensor& targets, int64_t columns, double temperature,
                              const Tensor& record) {
  const auto shape = logits_of(logits, columns);
  STD_TORCH_CHECK(record.size(0) == 3 || record.size(0) == 4, "a record has 3 or 4 words");
  return {shape, targets_of(targets, shape.rows), temperature, doubles_of(record, shape.rows), record.size(0) == 4};
}

unirl::LossChoice loss_choice(int64_t kind, const std::vector<double>& constants) {
  STD_TORCH_CHECK(0 <= kind && kind < 6, "no such loss");
  STD_TORCH_CHECK(constants.size() == unirl::kLossConstants, "a loss has 6 constants");
  return {kind, constants.data()};
}

const unirl::RowKernels& kernels() { return unirl::row_kernels(unirl::current_isa()); }

void row_records(Tensor logits, Tensor targets, int64_t columns, double temperature, Tensor record) {
  const auto task = record_task(logits, targets, columns, temperature, record);
  for_rows(task, task.logits.rows, task.logits.width, kernels().record);
}

void write_gradient(Tensor logits, Tensor targets, int64_t columns, double temperature, Tensor rows) {
  const auto shape = logits_of(logits, columns);
  STD_TORCH_CHECK(rows.size(0) == 5, "a gradient needs 5 values per row");
  const unirl::GradientTask task{shape, targets_of(targets, shape.rows), temperature, doubles_of(rows, shape.rows)};
  for_rows(task, shape.rows, shape.width, kernels().gradient);
}

void token_losses(int64_t kind, std::vector<double> constants, Tensor terms, Tensor result) {
  const int64_t rows = terms.size(1);
  STD_TORCH_CHECK(terms.size(0) == 4 && result.size(0) == 4, "a token has 4 terms and 4 results");
  const unirl::TokenTask task{loss_choice(kind, constants), rows, doubles_of(terms, rows), doubles_of(result, rows)};
  for_rows(task, rows, 1, kernels().tokens);
}

void policy_rows(Tensor logits, Tensor targets, int64_t columns, double temperature, int64_t kind,
                 std::vector<double> constants, Tensor terms, Tensor record, Tensor result) {
  const auto rows = record_task(logits, targets, columns, temperature, record);
  STD_TORCH_CHECK(terms.size(0) == 5 && result.size(0) == 4, "a row has 5 terms and 4 results");
  const unirl::PolicyTask task{rows, loss_choice(kind, constants), doubles_of(terms, rows.logits.rows),
                               doubles_of(result, rows.logits.rows)};
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
