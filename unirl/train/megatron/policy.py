"""A policy in Megatron-Core that says how likely tokens are; the policy under training builds on it."""

from collections.abc import Sequence

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from unirl.config.schema import ModelConfig, ParallelConfig
from unirl.kernels import linear_token_logprob, token_logprob
from unirl.train.megatron.architecture import Architecture
from unirl.train.megatron.hosted import HostedModel
from unirl.train.megatron.model import PolicyModel
from unirl.train.packing import MicroBatch


class MegatronPolicy(HostedModel):
    """A frozen policy; `temperature` divides the logits before every log-prob.

    logits_chunk_tokens: as `stack.logits_chunk_tokens`. Policies that are compared need the same one, and the same
    micro-batches: else their log-probs are rounded in different ways.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        parallel: ParallelConfig,
        temperature: float,
        seed: int,
        recompute: str = "none",
        logits_chunk_tokens: int | None = None,
    ):
        self.temperature = temperature
        self.logits_chunk_tokens = logits_chunk_tokens
        super().__init__(model, parallel=parallel, seed=seed, recompute=recompute)
        self.model.stores_logits = logits_chunk_tokens is None

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Log-probs and entropies (in nats) of the response tokens, [R] float32 each, for every micro-batch."""
        return self._collect(micro_batches, self._token_log_probs)

    def _make_model(self, architecture: Architecture, config: TransformerConfig, seed: int) -> PolicyModel:
        return PolicyModel(architecture, config)

    def _token_log_probs(self, batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """output: logits [R, V], or hidden states [R, H] where the logits are not stored."""
        options = {"temperature": self.temperature, "vocab": self.vocab_size, "with_entropy": True}
        if self.logits_chunk_tokens is None:
            return token_logprob(output, batch.targets, **options)
        return linear_token_logprob(
            output, self.model.head_weight, batch.targets, chunk_tokens=self.logits_chunk_tokens, **options
        )
