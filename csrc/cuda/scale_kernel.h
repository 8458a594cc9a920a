// Multiplies a gradient by a number that only the device knows; by 1, which is the rule, nothing is read.
#pragma once

#include "elements.h"

namespace unirl {

struct ScaleArgs {
  Logits logits;  // hold their gradient
  const float* factor;
};

template <class Element>
struct ScaleKernel {
  using Args = ScaleArgs;
  static constexpr const char* kName = "scale_gradient";
  static constexpr int kBlocksPerSm = 8;
  static constexpr int kPer = Codec<Element>::kPer;

  const Args& args;

  UNIRL_DEVICE explicit ScaleKernel(const Args& args_) : args(args_) {}

  UNIRL_DEVICE void run() {
    const float factor = *args.factor;
    if (factor == 1.0f) return;
    for (int64_t row = simt::block(); row < args.logits.rows; row += simt::blocks()) scale_row(row, factor);
  }

  UNIRL_DEVICE void scale_row(int64_t row, float factor) const {
    const Span<Element> span(row_of<Element>(args.logits, row), args.logits.width);
    for (int v = simt::thread(); v < span.vectors; v += simt::kThreads) {
      float x[kPer];
      Codec<Element>::unpack(simt::read_once(span.vector(v)), x);
      for (float& value : x) value *= factor;
      simt::write_once(span.vector(v), Codec<Element>::pack(x));
    }
    if (simt::thread() < span.edges()) {
      Element* edge = span.data + span.edge_column(simt::thread());
      Codec<Element>::store(edge, factor * Codec<Element>::load(edge));
    }
  }
};

}  // namespace unirl
