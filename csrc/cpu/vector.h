// A vector of UNIRL_LANES floats in the compiler's own vector extension: the flags of the file decide the instructions.
#pragma once

#include <stdint.h>
#include <string.h>

#include "../common/row_math.h"

namespace unirl {
inline namespace UNIRL_ISA {

constexpr int64_t kLanes = UNIRL_LANES;
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef double Doubles __attribute__((vector_size(kLanes * 8)));

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline Floats broadcast(float value) { return Floats{} + value; }

// A NaN in `v` is dropped by `larger` and kept by `at_least`: the operand order matters.
inline Floats larger(Floats best, Floats v) { return best < v ? v : best; }
inline Floats at_least(Floats v, float bound) {
  const Floats low = broadcast(bound);
  return v < low ? low : v;
}

inline float to_float(float x) { return x; }
inline float to_float(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline Floats load(const float* p) {
  Floats v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline Floats load(const uint16_t* p) {
  Halves h;
  memcpy(&h, p, sizeof h);
  return reinterpret_cast<Floats>(__builtin_convertvector(h, Words) << 16);
}

inline void store(float* p, Floats v) { memcpy(p, &v, sizeof v); }
inline void store(uint16_t* p, Floats v) {  // rounds to nearest, ties to even; a NaN stays one
  const Words bits = reinterpret_cast<Words>(v);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words quiet_nan = Words{} + 0x7fc0u;
  const Halves h = __builtin_convertvector(v == v ? rounded : quiet_nan, Halves);
  memcpy(p, &h, sizeof h);
}

// The last, partial vector of a row: `count` elements, the other lanes `fill`.
template <class Element>
inline Floats load_part(const Element* p, int64_t count, float fill) {
  float lanes[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = i < count ? to_float(p[i]) : fill;
  return load(lanes);
}
template <class Element>
inline void store_part(Element* p, int64_t count, Floats v) {
  Element lanes[kLanes];
  store(lanes, v);
  memcpy(p, lanes, count * sizeof(Element));
}

inline float max_of(Floats v) {
  float best = v[0];
  for (int64_t i = 1; i < kLanes; ++i) best = best < v[i] ? v[i] : best;
  return best;
}
inline double sum_of(Floats v) {
  double sum = 0.0;
  for (int64_t i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// 2^r for |r| <= 0.5, 9e-9 off before rounding: (2^r - 1) / r interpolated in six Chebyshev points.
inline Floats exp2_fraction(Floats r) {
  Floats p = broadcast(1.5453163e-4f);
  p = p * r + 1.3390863e-3f;
  p = p * r + 9.6180830e-3f;
  p = p * r + 5.5503570e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  return p * r + 1.0f;
}

// exp(d / temperature) for scale.lowest <= d <= 0, to about one unit in the last place; exactly 0 at the lower bound.
inline Floats exp_shift(Floats d, const ExponentScale& scale) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Floats shifted = d * scale.high + kRounder;
  const Floats whole = shifted - kRounder;
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  const Floats fraction = d * scale.low + (d * scale.high - whole);  // the inner product is fused, hence exact
#else
  const Doubles exact = __builtin_convertvector(d, Doubles) * (static_cast<double>(scale.high) + scale.low);
  const Floats fraction = __builtin_convertvector(exact - __builtin_convertvector(whole, Doubles), Floats);
#endif
  const Ints exponent = (reinterpret_cast<Ints>(shifted) + 127) << 23;  // the rounder's own bits fall off at the left
  return exp2_fraction(fraction) * reinterpret_cast<Floats>(exponent);
}

}  // namespace UNIRL_ISA
}  // namespace unirl
