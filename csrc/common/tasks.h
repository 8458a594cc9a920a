// What the torch operators hand to the row kernels of any C++ or CUDA back-end; pointers are of the device that runs.
#pragma once

#include <stdint.h>

namespace unirl {

// Columns of a target that are none: another shard holds it, or the row is masked and stays unread (an empty record).
constexpr int64_t kElsewhere = -1;
constexpr int64_t kUnread = -2;

// Logits [rows, width] of float32, or of bfloat16 as uint16; the first `columns` of each row are real, the rest padding.
struct Logits {
  void* data;
  int64_t rows, width, stride, columns;
  bool bfloat16;
};

struct RecordTask {
  Logits logits;
  const int64_t* targets;  // [rows] columns, kElsewhere or kUnread
  double temperature;
  double* record;  // [3 or 4, rows]: maximum, sum, target, shift
  bool with_shift;
};

struct GradientTask {
  Logits logits;  // overwritten
  const int64_t* targets;
  double temperature;
  const double* rows;  // [5, rows]: peak, total, entropy, gradient of logp, gradient of the entropy
};

// A policy loss and its constants in the order of policy_loss.h, where they get their names; always in host memory.
struct LossChoice {
  int64_t kind;
  const double* constants;  // lowest, highest, cap, epsilon, tau_pos, tau_neg
};
constexpr int64_t kLossConstants = 6;

// The losses of tokens whose log-probs are known.
struct TokenTask {
  LossChoice loss;
  int64_t rows;
  const double* terms;  // [4, rows]: logp, old_logp, anchor_logp, advantage
  double* result;       // [4, rows]: ratio, loss, d loss / d logp, flags
};

// Logits of the whole vocabulary to losses, and the gradient of their weighted sum over the logits.
struct PolicyTask {
  RecordTask record;  // logits overwritten
  LossChoice loss;
  const double* terms;  // [5, rows]: old_logp, anchor_logp, advantage, weight of the loss, weight of the entropy
  double* result;       // as of TokenTask
};

}  // namespace unirl
