// Policy losses of one token and their derivatives in closed form, for every C++ and CUDA back-end.
//
// The formulas and their sources are those of unirl/algorithms/{ppo,drpo,spo,dppo,sapo,cispo}.py; the tests hold the
// two against each other in double.
#pragma once

#include "row_math.h"

namespace unirl {
inline namespace UNIRL_ISA {

enum class LossKind : int64_t { ppo = 0, drpo = 1, spo = 2, dppo = 3, sapo = 4, cispo = 5 };

struct PolicyLoss {
  LossKind kind;
  double lowest, highest;   // ends of the ratio clip (ppo, cispo)
  double cap;               // dual clip: the loss is at most cap |A| (ppo); infinity: none
  double epsilon;           // drpo_epsilon, spo_epsilon or dppo_delta
  double tau_pos, tau_neg;  // temperatures of the gate where A > 0 and elsewhere (sapo)
};

struct TokenTerms {
  double logp, old_logp, anchor_logp;  // policy, rollout policy, anchor of the ratio
  double advantage;
};

struct TokenLoss {
  double ratio;
  double loss;
  double slope;        // d loss / d logp
  bool upper, lower;   // beyond an end of the trust region
  bool capped;         // the dual clip is active
};

constexpr double kMaxLogRatio = 20.0;

UNIRL_HD bool is_finite(double x) { return x - x == 0.0; }
UNIRL_HD double clamp(double x, double low, double high) { return x < low ? low : x > high ? high : x; }
UNIRL_HD double sigmoid(double x) { return 1.0 / (1.0 + ::exp(-x)); }

// max(-A r, -A clip(r)), at most cap |A|; no slope where a clip is active.
UNIRL_HD void clipped_ratio_loss(const PolicyLoss& config, double a, double ratio_slope, TokenLoss& token) {
  const double r = token.ratio;
  const double plain = -a * r, clipped = -a * clamp(r, config.lowest, config.highest);
  const double larger = plain > clipped ? plain : clipped;
  const double bound = config.cap * ::fabs(a);  // NaN for no cap and A = 0: then nothing is capped either
  token.upper = a > 0.0 && r > config.highest;
  token.lower = a < 0.0 && r < config.lowest;
  token.capped = larger > bound;
  token.loss = token.capped ? bound : larger;
  token.slope = token.upper || token.lower || token.capped ? 0.0 : -a * ratio_slope;
}

// -A r + |A| scale (r - 1)^2 / (2 epsilon): scale is the rollout probability (drpo) or 1 (spo).
UNIRL_HD void quadratic_loss(const PolicyLoss& config, double a, double scale, double ratio_slope, TokenLoss& token) {
  const double shift = scale * (token.ratio - 1.0);
  token.loss = -a * token.ratio + ::fabs(a) * shift * (token.ratio - 1.0) / (2.0 * config.epsilon);
  token.slope = (::fabs(a) * shift / config.epsilon - a) * ratio_slope;
  token.upper = a > 0.0 && shift > config.epsilon;
  token.lower = a < 0.0 && shift < -config.epsilon;
}

// -A r, and nothing where the probability of the token has shifted too far in the direction that A pushes.
UNIRL_HD void masked_shift_loss(const PolicyLoss& config, const TokenTerms& terms, double ratio_slope,
                                TokenLoss& token) {
  const double a = terms.advantage;
  const bool far = ::fabs(::exp(terms.logp) - ::exp(terms.anchor_logp)) > config.epsilon;
  token.upper = far && a > 0.0 && token.ratio > 1.0;
  token.lower = far && a < 0.0 && token.ratio < 1.0;
  const bool masked = token.upper || token.lower;
  token.loss = masked ? 0.0 : -a * token.ratio;
  token.slope = masked ? 0.0 : -a * ratio_slope;
}

// -A (4 / tau) s with s = sigmoid(tau (r - 1)); the gate has fallen to half its height at |tau (r - 1)| = acosh(3).
UNIRL_HD void gated_loss(const PolicyLoss& config, double a, double ratio_slope, TokenLoss& token) {
  constexpr double kFar = 1.7627471740390859;
  const double tau = a > 0.0 ? config.tau_pos : config.tau_neg;
  const double x = tau * (token.ratio - 1.0);
  token.loss = -a * (4.0 / tau) * sigmoid(x);
  token.slope = -4.0 * a * sigmoid(x) * sigmoid(-x) * ratio_slope;
  token.upper = a > 0.0 && x > kFar;
  token.lower = a < 0.0 && x < -kFar;
}

// -A logp clip(r), no slope through the clipped ratio.
UNIRL_HD void weighted_logp_loss(const PolicyLoss& config, const TokenTerms& terms, TokenLoss& token) {
  token.slope = -terms.advantage * clamp(token.ratio, config.lowest, config.highest);
  token.loss = token.slope * terms.logp;
  token.upper = token.ratio > config.highest;
  token.lower = token.ratio < config.lowest;
}

// All terms must be finite. The log ratio is clamped to [-20, 20]; beyond, the ratio has no slope.
UNIRL_HD TokenLoss token_loss(const PolicyLoss& config, const TokenTerms& terms) {
  const double log_ratio = terms.logp - terms.anchor_logp;
  TokenLoss token = {::exp(clamp(log_ratio, -kMaxLogRatio, kMaxLogRatio)), 0.0, 0.0, false, false, false};
  const double slope = ::fabs(log_ratio) <= kMaxLogRatio ? token.ratio : 0.0;
  switch (config.kind) {
    case LossKind::ppo: clipped_ratio_loss(config, terms.advantage, slope, token); break;
    case LossKind::drpo: quadratic_loss(config, terms.advantage, ::exp(terms.old_logp), slope, token); break;
    case LossKind::spo: quadratic_loss(config, terms.advantage, 1.0, slope, token); break;
    case LossKind::dppo: masked_shift_loss(config, terms, slope, token); break;
    case LossKind::sapo: gated_loss(config, terms.advantage, slope, token); break;
    case LossKind::cispo: weighted_logp_loss(config, terms, token); break;
  }
  return token;
}

}  // namespace UNIRL_ISA
}  // namespace unirl
