// Row arithmetic that every C++ and CUDA back-end shares: one formula, one place.
//
// For a row x with maximum m, temperature t, d_j = x_j - m and e_j = exp(d_j / t):
//   record    sum_j e_j  and  sum_j e_j d_j / t, both relative to m, so that nothing large is ever rounded;
//   gradient  e_j (a + b d_j), where a and b hold everything that is constant along the row.
// docs/kernels.md derives them.
#pragma once

#include <math.h>
#include <stdint.h>

#if defined(__CUDACC__)
#define UNIRL_HD __host__ __device__ __forceinline__
#else
#define UNIRL_HD inline
#endif

// The CPU kernels compile this header once per instruction set; a namespace of its own for each keeps the linker from
// handing AVX-512 code to a machine without it. For the same reason nothing here uses the C++ library's templates.
#if !defined(UNIRL_ISA)
#define UNIRL_ISA portable
#endif

namespace unirl {
inline namespace UNIRL_ISA {

// log2(e) / temperature as an unevaluated sum of two floats: rounded to one, it would tilt every exponent of the row
// the same way, by up to 6e-8 of its size.
struct ExponentScale {
  float high;
  float low;
  float lowest;  // a shift d this low gives e = 0 in float32; clamping there keeps 0 * -inf out of the sums

  UNIRL_HD explicit ExponentScale(double temperature) {
    const double scale = 1.4426950408889634 / temperature;
    high = static_cast<float>(scale);
    low = static_cast<float>(scale - static_cast<double>(high));
    lowest = -127.0f / high;
  }
};

// What to subtract from a row: its maximum, or 0 where that is -inf (-inf - -inf would be NaN).
UNIRL_HD float finite_base(float row_max) { return row_max == -INFINITY ? 0.0f : row_max; }

// Sums over the part of a row that has been seen, relative to its maximum so far.
struct RunningSums {
  float max = -INFINITY;
  double sum = 0.0;    // sum_j e_j
  double shift = 0.0;  // sum_j e_j d_j, in units of the logits

  // Moves the sums to the maximum of the block that comes next.
  UNIRL_HD void raise(float block_max, double temperature) {
    if (!(block_max > max)) return;
    const double step = static_cast<double>(finite_base(max)) - static_cast<double>(block_max);
    const double factor = sum == 0.0 ? 0.0 : ::exp(step / temperature);
    shift = factor == 0.0 ? 0.0 : factor * (shift + sum * step);
    sum = factor == 0.0 ? 0.0 : factor * sum;
    max = block_max;
  }
};

// One row of the gradient of  grad_logp * logp + grad_entropy * entropy.
struct RowGradient {
  double temperature, peak, log_total, entropy, grad_logp, grad_entropy;
  float a;
  float b;
  bool silent;  // nothing flows back, or no logit of the row is finite: write zeros, read nothing

  UNIRL_HD RowGradient(double temperature_, double peak_, double total, double entropy_, double grad_logp_,
                       double grad_entropy_)
      : temperature(temperature_),
        peak(peak_),
        log_total(::log(total)),
        entropy(entropy_),
        grad_logp(grad_logp_),
        grad_entropy(grad_entropy_) {
    silent = total == 0.0 || (grad_logp == 0.0 && grad_entropy == 0.0);
    // -p (grad_logp + grad_entropy (log p + H)) / t  with  p = e / total  and  log p = d / t - log(total)
    const double scale = -1.0 / (total * temperature);
    a = static_cast<float>(scale * (grad_logp + grad_entropy * (entropy - log_total)));
    b = static_cast<float>(scale * grad_entropy / temperature);
  }

  // The target's own column, in double and without the cancellation in 1 - p of a confident token.
  UNIRL_HD float at_target(float x) const {
    const double logp = (static_cast<double>(x) - peak) / temperature - log_total;
    const double p = ::exp(logp);
    const double surprise = p == 0.0 ? 0.0 : p * (logp + entropy);
    return static_cast<float>((-grad_logp * ::expm1(logp) - grad_entropy * surprise) / temperature);
  }
};

}  // namespace UNIRL_ISA
}  // namespace unirl
