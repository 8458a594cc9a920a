// The second and third of the three passes: reads the logits once more and writes the gradient over them.
#pragma once

#include "lane_sums.h"

namespace unirl {

struct GradientArgs {
  GradientTask task;
  ExponentScale scale;
  int parts;  // blocks that share a row
};

template <class Element>
struct GradientKernel {
  using Args = GradientArgs;
  static constexpr const char* kName = "write_gradient";
  static constexpr int kBlocksPerSm = 6;
  static constexpr int kUnroll = 4;

  const Args& args;

  UNIRL_DEVICE explicit GradientKernel(const Args& args_) : args(args_) {}

  UNIRL_DEVICE void run() {
    const Logits& logits = args.task.logits;
    const int part = static_cast<int>(simt::block() % args.parts);
    const int64_t row = simt::block() / args.parts, target = args.task.targets[row];
    Element* data = row_of<Element>(logits, row);
    const Span<Element> span(data, logits.columns);
    const Range range = share_of(span.vectors, part, args.parts);
    const bool owner = target >= 0 && owns(span, range, part, static_cast<int>(target));

    Coefficients& shared = *reinterpret_cast<Coefficients*>(simt::shared());
    if (simt::thread() == 0) shared.set(row_gradient(row), target, owner ? Codec<Element>::load(data + target) : 0.0f);
    simt::block_barrier();
    const Coefficients coefficients = shared;
    if (coefficients.silent) {
      write_zeros(data, logits.width, part, args.parts);
      return;
    }
    const DeviceScale scale(args.scale);
    write_vectors(span, range, coefficients, scale);
    if (part == 0 && simt::thread() < span.edges()) {
      Element* edge = data + span.edge_column(simt::thread());
      Codec<Element>::store(edge, coefficients.of(Codec<Element>::load(edge), scale));
    }
    write_zeros(data + logits.columns, logits.width - logits.columns, part, args.parts);
    simt::block_barrier();
    if (owner && simt::thread() == 0) Codec<Element>::store(data + target, coefficients.own);
  }

  // Whether this block writes the column of the target.
  static UNIRL_DEVICE bool owns(const Span<Element>& span, Range range, int part, int target) {
    const int v = target < span.head ? -1 : (target - span.head) / Span<Element>::kPer;
    const bool edge = v < 0 || v >= span.vectors;
    return edge ? part == 0 : range.first <= v && v < range.last;
  }

  UNIRL_DEVICE RowGradient row_gradient(int64_t row) const {
    const double* in = args.task.rows + row;
    const int64_t rows = args.task.logits.rows;
    return RowGradient(args.task.temperature, in[0], in[rows], in[2 * rows], in[3 * rows], in[4 * rows]);
  }

  static UNIRL_DEVICE void write_vectors(const Span<Element>& span, Range range, const Coefficients& coefficients,
                                         const DeviceScale& scale) {
    int v = range.first + simt::thread();
    for (; v + (kUnroll - 1) * simt::kThreads < range.last; v += kUnroll * simt::kThreads) {
      Words words[kUnroll];  // all loads leave before the first is waited for
      for (int u = 0; u < kUnroll; ++u) words[u] = simt::read_once(span.vector(v + u * simt::kThreads));
      for (int u = 0; u < kUnroll; ++u)
        simt::write_once(span.vector(v + u * simt::kThreads), coefficients.of<Element>(words[u], scale));
    }
    for (; v < range.last; v += simt::kThreads)
      simt::write_once(span.vector(v), coefficients.of<Element>(simt::read_once(span.vector(v)), scale));
  }
};

}  // namespace unirl
