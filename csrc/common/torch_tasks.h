// From the arguments of the torch operators to tasks, with what must hold checked; torch's stable ABI only.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "tasks.h"

namespace unirl {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Logits logits_of(const Tensor& logits, int64_t columns) {
  const auto dtype = logits.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, "logits must be float32 or bfloat16");
  STD_TORCH_CHECK(logits.dim() == 2 && (logits.size(1) <= 1 || logits.stride(1) == 1), "logits must have dense rows");
  STD_TORCH_CHECK(0 <= columns && columns <= logits.size(1), "more real columns than columns");
  return {logits.data_ptr(), logits.size(0), logits.size(1), logits.stride(0), columns, dtype == ScalarType::BFloat16};
}

inline const int64_t* targets_of(const Tensor& targets, int64_t rows) {
  STD_TORCH_CHECK(targets.scalar_type() == ScalarType::Long && targets.is_contiguous() && targets.numel() == rows,
                  "targets must be contiguous int64, one per row");
  return static_cast<const int64_t*>(targets.data_ptr());
}

inline double* doubles_of(const Tensor& values, int64_t rows) {
  STD_TORCH_CHECK(values.scalar_type() == ScalarType::Double && values.is_contiguous() && values.dim() == 2 &&
                      values.size(1) == rows,
                  "per-row values must be contiguous float64 [n, rows]");
  return static_cast<double*>(values.data_ptr());
}

inline RecordTask record_task(const Tensor& logits, const Tensor& targets, int64_t columns, double temperature,
                              const Tensor& record) {
  const auto shape = logits_of(logits, columns);
  STD_TORCH_CHECK(record.size(0) == 3 || record.size(0) == 4, "a record has 3 or 4 words");
  return {shape, targets_of(targets, shape.rows), temperature, doubles_of(record, shape.rows), record.size(0) == 4};
}

inline LossChoice loss_choice(int64_t kind, const std::vector<double>& constants) {
  STD_TORCH_CHECK(0 <= kind && kind < 6, "no such loss");
  STD_TORCH_CHECK(constants.size() == kLossConstants, "a loss has 6 constants");
  return {kind, constants.data()};
}

inline GradientTask gradient_task(const Tensor& logits, const Tensor& targets, int64_t columns, double temperature,
                                  const Tensor& rows) {
  const auto shape = logits_of(logits, columns);
  STD_TORCH_CHECK(rows.size(0) == 5, "a gradient needs 5 values per row");
  return {shape, targets_of(targets, shape.rows), temperature, doubles_of(rows, shape.rows)};
}

inline TokenTask token_task(int64_t kind, const std::vector<double>& constants, const Tensor& terms,
                            const Tensor& result) {
  const int64_t rows = terms.size(1);
  STD_TORCH_CHECK(terms.size(0) == 4 && result.size(0) == 4, "a token has 4 terms and 4 results");
  return {loss_choice(kind, constants), rows, doubles_of(terms, rows), doubles_of(result, rows)};
}

inline PolicyTask policy_task(const RecordTask& record, int64_t kind, const std::vector<double>& constants,
                              const Tensor& terms, const Tensor& result) {
  const int64_t rows = record.logits.rows;
  STD_TORCH_CHECK(terms.size(0) == 5 && result.size(0) == 4, "a row has 5 terms and 4 results");
  return {record, loss_choice(kind, constants), doubles_of(terms, rows), doubles_of(result, rows)};
}

}  // namespace unirl
