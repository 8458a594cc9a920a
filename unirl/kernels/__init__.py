"""Log-probs, entropies and policy losses of tokens from vocabulary-parallel logits; docs/kernels.md says how."""

from unirl.kernels.backends import BackendUnavailable, available_backends
from unirl.kernels.linear_token_logprob import linear_token_logprob
from unirl.kernels.loss_spec import LossSpec, fused_loss_refusal
from unirl.kernels.policy_loss import FusedPolicyLoss, fused_policy_loss
from unirl.kernels.support_logprob import linear_support_logprob, support_logprob
from unirl.kernels.token_logprob import token_logprob

__all__ = [
    "BackendUnavailable",
    "FusedPolicyLoss",
    "LossSpec",
    "available_backends",
    "fused_loss_refusal",
    "fused_policy_loss",
    "linear_support_logprob",
    "linear_token_logprob",
    "support_logprob",
    "token_logprob",
]
