// Rows of logits as 16-byte vectors: 4 float32 or 8 bfloat16 (as uint16), and what does not fill one at either end.
#pragma once

#include <math.h>

#include "../common/tasks.h"
#include "simt.h"

namespace unirl {

using simt::Words;

UNIRL_DEVICE float float_of_bits(uint32_t bits) {
#if defined(__CUDACC__)
  return __uint_as_float(bits);
#else
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
#endif
}
UNIRL_DEVICE uint32_t bits_of_float(float value) {
#if defined(__CUDACC__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

template <class Element>
struct Codec;

template <>
struct Codec<float> {
  static constexpr int kPer = 4;
  static constexpr uint32_t kNothing = 0xff800000u;  // -inf
  static UNIRL_DEVICE float load(const float* p) { return *p; }
  static UNIRL_DEVICE void store(float* p, float x) { *p = x; }
  static UNIRL_DEVICE void unpack(const Words& v, float* x) {
    for (int i = 0; i < 4; ++i) x[i] = float_of_bits(v.w[i]);
  }
  static UNIRL_DEVICE Words pack(const float* x) {
    Words v;
    for (int i = 0; i < 4; ++i) v.w[i] = bits_of_float(x[i]);
    return v;
  }
};

template <>
struct Codec<uint16_t> {
  static constexpr int kPer = 8;
  static constexpr uint32_t kNothing = 0xff80ff80u;  // -inf twice
  static UNIRL_DEVICE float load(const uint16_t* p) { return float_of_bits(static_cast<uint32_t>(*p) << 16); }
  static UNIRL_DEVICE void store(uint16_t* p, float x) { *p = static_cast<uint16_t>(simt::bfloat16_pair(x, 0.0f)); }
  static UNIRL_DEVICE void unpack(const Words& v, float* x) {
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = float_of_bits(v.w[i] << 16);
      x[2 * i + 1] = float_of_bits(v.w[i] & 0xffff0000u);
    }
  }
  static UNIRL_DEVICE Words pack(const float* x) {
    Words v;
    for (int i = 0; i < 4; ++i) v.w[i] = simt::bfloat16_pair(x[2 * i], x[2 * i + 1]);
    return v;
  }
};

// Columns [0, columns) from `data` on: `vectors` whole ones, the first at column `head`, and fewer than two vectors'
// worth of edge columns around them.
template <class Element>
struct Span {
  static constexpr int kPer = Codec<Element>::kPer;
  Element* data;
  int columns, head, vectors;

  UNIRL_DEVICE Span(Element* data_, int64_t columns_) : data(data_), columns(static_cast<int>(columns_)) {
    const int beyond = static_cast<int>(reinterpret_cast<uintptr_t>(data) % sizeof(Words) / sizeof(Element));
    head = beyond == 0 ? 0 : kPer - beyond;
    head = head < columns ? head : columns;
    vectors = (columns - head) / kPer;
  }
  UNIRL_DEVICE Words* vector(int v) const { return reinterpret_cast<Words*>(data + head) + v; }
  UNIRL_DEVICE int edges() const { return columns - vectors * kPer; }
  UNIRL_DEVICE int edge_column(int edge) const { return edge < head ? edge : edge + vectors * kPer; }
};

template <class Element>
UNIRL_DEVICE Element* row_of(const Logits& logits, int64_t row) {
  return static_cast<Element*>(logits.data) + row * logits.stride;
}

// Some of a span's vectors: those that one block, or one chunk of it, takes care of.
struct Range {
  int first, last;
  UNIRL_DEVICE int count() const { return last - first; }
};
// The share of the `part`-th of `parts`.
UNIRL_DEVICE Range share_of(int vectors, int part, int parts) {
  const int each = (vectors + parts - 1) / parts;
  const int first = part * each < vectors ? part * each : vectors;
  return {first, first + each < vectors ? first + each : vectors};
}

// Zeros over the share of one block of `parts`, all threads together.
template <class Element>
UNIRL_DEVICE void write_zeros(Element* data, int64_t columns, int part, int parts) {
  const Span<Element> span(data, columns);
  const Range range = share_of(span.vectors, part, parts);
  for (int v = range.first + simt::thread(); v < range.last; v += simt::kThreads)
    simt::write_once(span.vector(v), Words{{0, 0, 0, 0}});
  if (part == 0 && simt::thread() < span.edges()) Codec<Element>::store(data + span.edge_column(simt::thread()), 0.0f);
}

}  // namespace unirl
