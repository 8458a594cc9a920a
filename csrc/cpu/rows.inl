// The row kernels, one source for all instruction sets: each includer defines UNIRL_ISA and UNIRL_LANES.
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
void record_rows(const RecordTask& task, int64_t first, int64_t last) {
  const ExponentScale scale(task.temperature);
  const int64_t rows = task.logits.rows, columns = task.logits.columns;
  for (int64_t row = first; row < last; ++row) {
    const Element* x = static_cast<const Element*>(task.logits.data) + row * task.logits.stride;
    RunningSums sums;
    for (int64_t begin = 0; begin < columns; begin += kBlock) {
      const int64_t count = smaller(kBlock, columns - begin);
      sums.raise(block_max(x + begin, count), task.temperature);
      add_block<kWithShift>(x + begin, count, scale, sums);
    }
    const int64_t target = task.targets[row];
    const double base = finite_base(sums.max);
    task.record[row] = sums.max;
    task.record[rows + row] = sums.sum;
    task.record[2 * rows + row] = target < 0 ? -INFINITY : (to_float(x[target]) - base) / task.temperature;
    if (kWithShift) task.record[3 * rows + row] = sums.shift / task.temperature;
  }
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
void gradient_rows(const GradientTask& task, int64_t first, int64_t last) {
  const ExponentScale scale(task.temperature);
  const int64_t rows = task.logits.rows, columns = task.logits.columns, width = task.logits.width;
  for (int64_t r = first; r < last; ++r) {
    Element* x = static_cast<Element*>(task.logits.data) + r * task.logits.stride;
    const double* in = task.rows + r;
    const RowGradient row(task.temperature, in[0], in[rows], in[2 * rows], in[3 * rows], in[4 * rows]);
    if (row.silent) {
      memset(x, 0, width * sizeof(Element));
      continue;
    }
    const int64_t target = task.targets[r];
    const float own = target < 0 ? 0.0f : row.at_target(to_float(x[target]));
    write_row(x, columns, scale, row);
    if (target >= 0) store_part(x + target, 1, broadcast(own));
    memset(x + columns, 0, (width - columns) * sizeof(Element));
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

}  // namespace UNIRL_ISA
}  // namespace unirl
