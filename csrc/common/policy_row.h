// One row of the fused policy loss, between its record and its gradient: what the C++ and the CUDA kernels share.
#pragma once

#include "policy_loss.h"
#include "tasks.h"

namespace unirl {
inline namespace UNIRL_ISA {

// The words of a record (unirl/kernels/records.py); shift is 0 where the entropy is not asked for.
struct RowRecord {
  double max, sum, target, shift;
};

UNIRL_HD PolicyLoss loss_of(const LossChoice& choice) {
  const double* c = choice.constants;
  return {static_cast<LossKind>(choice.kind), c[0], c[1], c[2], c[3], c[4], c[5]};
}

// A token whose log-prob is not finite takes no part.
UNIRL_HD TokenLoss loss_of_token(const PolicyLoss& loss, const TokenTerms& terms) {
  if (is_finite(terms.logp)) return token_loss(loss, terms);
  return TokenLoss{1.0, 0.0, 0.0, false, false, false};
}

UNIRL_HD void write_result(const TokenLoss& token, double* result, int64_t rows) {
  result[0] = token.ratio;
  result[rows] = token.loss;
  result[2 * rows] = token.slope;
  result[3 * rows] = token.upper + 2 * token.lower + 4 * token.capped;
}

UNIRL_HD void write_record(const RowRecord& record, double* words, int64_t rows, bool with_shift) {
  words[0] = record.max;
  words[rows] = record.sum;
  words[2 * rows] = record.target;
  if (with_shift) words[3 * rows] = record.shift;
}

// The token losses of a task, row by row.
UNIRL_HD void token_row(const PolicyLoss& loss, const double* terms, double* result, int64_t rows) {
  const TokenTerms token = {terms[0], terms[rows], terms[2 * rows], terms[3 * rows]};
  write_result(loss_of_token(loss, token), result, rows);
}

struct PolicyRow {
  TokenLoss token;
  RowGradient gradient;
};

// terms: of the row, in a table of `rows` columns, see PolicyTask.
UNIRL_HD PolicyRow policy_row(const PolicyLoss& loss, const RowRecord& record, double temperature, const double* terms,
                              int64_t rows) {
  const double log_total = ::log(record.sum);
  // The log-prob is used as it is reported, rounded: an unchanged policy has ratio 1 exactly.
  const float logp = static_cast<float>(record.target - log_total);
  const double entropy = log_total - record.shift / record.sum;
  const TokenLoss token = loss_of_token(loss, {logp, terms[0], terms[rows], terms[2 * rows]});
  const bool live = is_finite(logp);
  const double grad_logp = live ? terms[3 * rows] * token.slope : 0.0;
  const double grad_entropy = live ? -terms[4 * rows] : 0.0;
  const double peak = finite_base(static_cast<float>(record.max));
  return {token, RowGradient(temperature, peak, record.sum, entropy, grad_logp, grad_entropy)};
}

}  // namespace UNIRL_ISA
}  // namespace unirl
