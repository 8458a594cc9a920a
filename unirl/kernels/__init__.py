"""Token log-probs and entropies over (vocabulary-parallel) logits; docs/kernels.md says how they work."""

from unirl.kernels.backends import BackendUnavailable, available_backends
from unirl.kernels.token_logprob import token_logprob

__all__ = ["BackendUnavailable", "available_backends", "token_logprob"]
