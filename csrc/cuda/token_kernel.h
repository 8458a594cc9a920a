// Losses of tokens whose log-probs are known, one thread each.
#pragma once

#include "../common/policy_row.h"
#include "simt.h"

namespace unirl {

struct TokenArgs {
  PolicyLoss loss;
  int64_t rows;
  const double* terms;
  double* result;
};

struct TokenKernel {
  using Args = TokenArgs;
  static constexpr const char* kName = "token_losses";
  static constexpr int kBlocksPerSm = 2;

  const Args& args;

  UNIRL_DEVICE explicit TokenKernel(const Args& args_) : args(args_) {}

  UNIRL_DEVICE void run() {
    const int64_t row = simt::block() * simt::kThreads + simt::thread();
    if (row < args.rows) token_row(args.loss, args.terms + row, args.result + row, args.rows);
  }
};

}  // namespace unirl
