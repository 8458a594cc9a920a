// The row kernels, one source for all instruction sets: each includer defines UNIRL_ISA and UNIRL_LANES.
#include "../common/policy_row.h"
#include "rows.h"
#include "vector.h"

namespace unirl {
inline namespace UNIRL_ISA {

// A block stays in the first-level cache between its two passes (maximum, then sums), so memory is read once. Each lane
// of the four independent chains adds 64 float32 terms per block; blocks add up in double.
constexpr int64_t kChains = 4;
constexpr int64_t kBlock = 64 * kChains * kLanes;

template <class Element>
float block_max(const Element* x, int64_t count) {
  Floats best0 = broadcast(-INFINITY), best1 = best0;
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    best0 = larger(best0, load(x + i));
    best1 = larger(best1, load(x + i + kLanes));
  }
  for (; i < count; i += kLanes) best0 = larger(best0, load_part(x + i, smaller(count - i, kLanes), -INFINITY));
  return max_of(larger(best0, best1));
}

template <bool kWithShift>
struct Accumulator {
  Floats sum = {}, shift = {};

  void add(Floats x, float base, const ExponentScale& scale) {
    const Floats d = at_least(x - base, scale.lowest);
    const Floats e = exp_shift(d, scale);
    sum += e;
    if (kWithShift) shift += e * d;
  }
};

template <bool kWithShift, class Element>
void add_block(const Element* x, int64_t count, const ExponentScale& scale, RunningSums& sums) {
  const float base = finite_base(sums.max);
  Accumulator<kWithShift> chains[kChains];
  int64_t i = 0;
  for (; i + kChains * kLanes <= count; i += kChains * kLanes)
    for (int64_t c = 0; c < kChains; ++c) chains[c].add(load(x + i + c * kLanes), base, scale);
  for (; i < count; i += kLanes)
    chains[0].add(load_part(x + i, smaller(count - i, kLanes), -INFINITY), base, scale);
  for (const auto& chain : chains) {
    sums.sum += sum_of(chain.sum);
    if (kWithShift) sums.shift += sum_of(chain.shift);
  }
}

template <bool kWithShift, class Element>
RunningSums sums_of(const Element* x, int64_t columns, const ExponentScale& scale, double temperature) {
  RunningSums sums;
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const int64_t count = smaller(kBlock, columns - begin);
    sums.raise(block_max(x + begin, count), temperature);
    add_block<kWithShift>(x + begin, count, scale, sums);
  }
  return sums;
}

template <class Element>
Element* row_of(const Logits& logits, int64_t row) {
  return static_cast<Element*>(logits.data) + row * logits.stride;
}

template <bool kWithShift, class Element>
RowRecord record_row(const RecordTask& task, const ExponentScale& scale, int64_t row) {
  const int64_t target = task.targets[row];
  const Element* x = row_of<Element>(task.logits, row);
  const RunningSums sums =
      target == kUnread ? RunningSums() : sums_of<kWithShift>(x, task.logits.columns, scale, task.temperature);
  const double base = finite_base(sums.max);
  const double own = target < 0 ? -INFINITY : (to_float(x[target]) - base) / task.temperature;
  const RowRecord record = {sums.max, sums.sum, own, sums.shift / task.temperature};
  write_record(record, task.record + row, task.logits.rows, kWithShift);
  return record;
}

template <bool kWithShift, class Element>
void record_rows(const RecordTask& task, int64_t first, int64_t last) {
  const ExponentScale scale(task.temperature);
  for (int64_t row = first; row < last; ++row) record_row<kWithShift, Element>(task, scale, row);
}

template <class Element>
void write_row(Element* x, int64_t columns, const ExponentScale& scale, const RowGradient& row) {
  const float peak = static_cast<float>(row.peak);
  const auto gradient = [&](Floats logits) {
    const Floats d = at_least(logits - peak, scale.lowest);
    return exp_shift(d, scale) * (d * row.b + row.a);
  };
  int64_t i = 0;
  for (; i + kLanes <= columns; i += kLanes) store(x + i, gradient(load(x + i)));
  if (i < columns) store_part(x + i, columns - i, gradient(load_part(x + i, columns - i, -INFINITY)));
}

template <class Element>
void gradient_row(const Logits& logits, int64_t r, int64_t target, const ExponentScale& scale, const RowGradient& row) {
  Element* x = row_of<Element>(logits, r);
  if (row.silent) {
    memset(x, 0, logits.width * sizeof(Element));
    return;
  }
  const float own = target < 0 ? 0.0f : row.at_target(to_float(x[target]));
  write_row(x, logits.columns, scale, row);
  if (target >= 0) store_part(x + target, 1, broadcast(own));
  memset(x + logits.columns, 0, (logits.width - logits.columns) * sizeof(Element));
}

template <class Element>
void gradient_rows(const GradientTask& task, int64_t first, int64_t last) {
  const ExponentScale scale(task.temperature);
  const int64_t rows = task.logits.rows;
  for (int64_t r = first; r < last; ++r) {
    const double* in = task.rows + r;
    const RowGradient row(task.temperature, in[0], in[rows], in[2 * rows], in[3 * rows], in[4 * rows]);
    gradient_row<Element>(task.logits, r, task.targets[r], scale, row);
  }
}

// The row is still in the second-level cache when the gradient is written over it: memory is read once.
template <bool kWithShift, class Element>
void policy_rows(const PolicyTask& task, int64_t first, int64_t last) {
  const double temperature = task.record.temperature;
  const ExponentScale scale(temperature);
  const PolicyLoss loss = loss_of(task.loss);
  const int64_t rows = task.record.logits.rows;
  for (int64_t row = first; row < last; ++row) {
    const RowRecord record = record_row<kWithShift, Element>(task.record, scale, row);
    const PolicyRow policy = policy_row(loss, record, temperature, task.terms + row, rows);
    write_result(policy.token, task.result + row, rows);
    gradient_row<Element>(task.record.logits, row, task.record.targets[row], scale, policy.gradient);
  }
}

void record(const RecordTask& task, int64_t first, int64_t last) {
  if (task.logits.bfloat16) {
    task.with_shift ? record_rows<true, uint16_t>(task, first, last) : record_rows<false, uint16_t>(task, first, last);
  } else {
    task.with_shift ? record_rows<true, float>(task, first, last) : record_rows<false, float>(task, first, last);
  }
}

void gradient(const GradientTask& task, int64_t first, int64_t last) {
  task.logits.bfloat16 ? gradient_rows<uint16_t>(task, first, last) : gradient_rows<float>(task, first, last);
}

void tokens(const TokenTask& task, int64_t first, int64_t last) {
  const PolicyLoss loss = loss_of(task.loss);
  for (int64_t row = first; row < last; ++row) token_row(loss, task.terms + row, task.result + row, task.rows);
}

void policy(const PolicyTask& task, int64_t first, int64_t last) {
  if (task.record.logits.bfloat16) {
    task.record.with_shift ? policy_rows<true, uint16_t>(task, first, last)
                           : policy_rows<false, uint16_t>(task, first, last);
  } else {
    task.record.with_shift ? policy_rows<true, float>(task, first, last) : policy_rows<false, float>(task, first, last);
  }
}

}  // namespace UNIRL_ISA
}  // namespace unirl
