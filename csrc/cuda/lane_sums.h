// What a thread has seen of a row, in float32, and how threads, warps and blocks of a cluster merge theirs.
#pragma once

#include "../common/policy_row.h"
#include "elements.h"

namespace unirl {

// A float32 scale, whose rounding `exact` takes back for the whole row: with e = 2^(scale d), d(sum e) is
// ln 2 sum(e d) d(scale). Doing so once per row saves three instructions per element.
struct DeviceScale {
  float scale, rest, lowest;

  UNIRL_DEVICE explicit DeviceScale(const ExponentScale& exponent)
      : scale(exponent.high), rest(exponent.low), lowest(exponent.lowest) {}
  UNIRL_DEVICE float shift(float x, float base) const { return simt::max_keep_nan(x - base, lowest); }
  UNIRL_DEVICE float exp(float shift) const { return simt::exp2_fast(shift * scale); }
};

// As RunningSums of row_math.h, without double: short chains of float32 sums.
struct LaneSums {
  float max = -INFINITY;
  float sum = 0.0f;
  float shift = 0.0f;

  // Moves the sums to a larger maximum; all of them 0 where nothing finite has been seen.
  UNIRL_DEVICE void raise(float to, const DeviceScale& scale) {
    const float step = scale.shift(max, finite_base(to));
    const float factor = scale.exp(step);
    shift = factor * simt::fused(sum, step, shift);
    sum = factor * sum;
    max = to;
  }

  template <int kCount>
  UNIRL_DEVICE void add(const float (&x)[kCount], const DeviceScale& scale) {
    constexpr int kChains = 4;
    static_assert(kCount % kChains == 0, "whole turns of the chains");
    float top[kChains] = {max, max, max, max};
    for (int i = 0; i < kCount; ++i) top[i % kChains] = simt::max_drop_nan(top[i % kChains], x[i]);
    raise(simt::max_drop_nan(simt::max_drop_nan(top[0], top[1]), simt::max_drop_nan(top[2], top[3])), scale);
    const float base = finite_base(max);
    float sums[kChains] = {}, shifts[kChains] = {};
    for (int i = 0; i < kCount; ++i) {
      const float d = scale.shift(x[i], base);
      const float e = scale.exp(d);
      sums[i % kChains] += e;
      shifts[i % kChains] = simt::fused(e, d, shifts[i % kChains]);
    }
    sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    shift += (shifts[0] + shifts[1]) + (shifts[2] + shifts[3]);
  }

  UNIRL_DEVICE void merge(LaneSums other, const DeviceScale& scale) {
    const float top = simt::max_drop_nan(max, other.max);
    raise(top, scale);
    other.raise(top, scale);
    sum += other.sum;
    shift += other.shift;
  }

  // Sums over all lanes of the warp, right in lane 0.
  UNIRL_DEVICE void merge_warp(const DeviceScale& scale) {
    for (int mask = simt::kWarp / 2; mask > 0; mask /= 2) {
      LaneSums other;
      other.max = simt::shuffle_xor(max, mask);
      other.sum = simt::shuffle_xor(sum, mask);
      other.shift = simt::shuffle_xor(shift, mask);
      merge(other, scale);
    }
  }

  // own: the target's logit, or anything where target < 0.
  UNIRL_DEVICE RowRecord record(const DeviceScale& scale, double temperature, int64_t target, float own) const {
    const double correction = 0.6931471805599453 * static_cast<double>(scale.rest) * static_cast<double>(shift);
    const double base = finite_base(max);
    return {max, static_cast<double>(sum) + correction, target < 0 ? -INFINITY : (own - base) / temperature,
            shift / temperature};
  }
};

constexpr int kMaxCluster = 8;  // what every device with clusters supports

// Shared memory of a reduction over a cluster. Two slots: a block may be a row ahead of another that still reads.
struct Exchange {
  LaneSums warps[simt::kThreads / simt::kWarp];
  LaneSums blocks[2][kMaxCluster];
};

// The sums of all threads of the cluster, the same bits in every block, right in thread 0. One cluster barrier.
UNIRL_DEVICE LaneSums merge_cluster(LaneSums sums, const DeviceScale& scale, Exchange& exchange, int turn, int rank,
                                    int cluster) {
  constexpr int kWarps = simt::kThreads / simt::kWarp;
  sums.merge_warp(scale);
  if (simt::thread() % simt::kWarp == 0) exchange.warps[simt::thread() / simt::kWarp] = sums;
  simt::block_barrier();
  LaneSums* slot = exchange.blocks[turn % 2];
  if (simt::thread() == 0) {
    for (int w = 1; w < kWarps; ++w) sums.merge(exchange.warps[w], scale);
    for (int r = 0; r < cluster; ++r) *simt::in_block(slot + rank, r) = sums;
  }
  simt::cluster_barrier();
  if (simt::thread() == 0) {
    sums = slot[0];
    for (int r = 1; r < cluster; ++r) sums.merge(slot[r], scale);
  }
  return sums;
}

// Vectors that a thread adds at a time. All kernels add in the same order, so a row has one log-prob, bit for bit, in
// each of them: edge columns first, then groups of kGroup vectors a thread, then lanes, warps and blocks. nvcc.options
// forbids the compiler to fuse on its own, which it might do differently in each kernel.
constexpr int kGroup = 4;
constexpr int kGroupVectors = kGroup * simt::kThreads;

// One group from vector `at` of this thread on; lanes past the end add nothing.
template <class Element, bool kWhole, class Load>
UNIRL_DEVICE void add_group(int at, int last, const Load& load, const DeviceScale& scale, LaneSums& sums) {
  constexpr int kPer = Codec<Element>::kPer;
  constexpr uint32_t kNothing = Codec<Element>::kNothing;
  const Words nothing = {{kNothing, kNothing, kNothing, kNothing}};
  Words words[kGroup];
  for (int u = 0; u < kGroup; ++u) {
    const int v = at + u * simt::kThreads;
    words[u] = kWhole || v < last ? load(v) : nothing;
  }
  float x[kGroup * kPer];
  for (int u = 0; u < kGroup; ++u) Codec<Element>::unpack(words[u], x + u * kPer);
  sums.add(x, scale);
}

template <class Element, class Load>
UNIRL_DEVICE void add_vectors(Range range, const Load& load, const DeviceScale& scale, LaneSums& sums) {
  int first = range.first;
  for (; first + kGroupVectors <= range.last; first += kGroupVectors)
    add_group<Element, true>(first + simt::thread(), range.last, load, scale, sums);
  if (first < range.last) add_group<Element, false>(first + simt::thread(), range.last, load, scale, sums);
}

UNIRL_DEVICE void add_one(float x, const DeviceScale& scale, LaneSums& sums) {
  const float lanes[4] = {x, -INFINITY, -INFINITY, -INFINITY};
  sums.add(lanes, scale);
}

// A row of the gradient, as the threads need it.
struct Coefficients {
  float peak, a, b;
  float own;  // the entry of the target's column
  bool silent;

  UNIRL_DEVICE void set(const RowGradient& row, int64_t target, float own_logit) {
    peak = static_cast<float>(row.peak);
    a = row.a;
    b = row.b;
    silent = row.silent;
    own = silent || target < 0 ? 0.0f : row.at_target(own_logit);
  }
  UNIRL_DEVICE float of(float x, const DeviceScale& scale) const {
    const float d = scale.shift(x, peak);
    return scale.exp(d) * simt::fused(d, b, a);
  }
  template <class Element>
  UNIRL_DEVICE Words of(const Words& words, const DeviceScale& scale) const {
    float x[Codec<Element>::kPer];
    Codec<Element>::unpack(words, x);
    for (float& value : x) value = of(value, scale);
    return Codec<Element>::pack(x);
  }
};

}  // namespace unirl
