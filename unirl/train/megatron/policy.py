"""A policy in Megatron-Core that says how likely tokens are; the policy under training builds on it."""

from collections.abc import Sequence

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from unirl.config.schema import ModelConfig, ParallelConfig
from unirl.kernels import token_logprob
from unirl.train.megatron.architecture import Architecture
from unirl.train.megatron.hosted import HostedModel
from unirl.train.megatron.model import PolicyModel
from unirl.train.packing import MicroBatch


class MegatronPolicy(HostedModel):
    """A frozen policy; `temperature` divides the logits before every log-prob."""

    def __init__(
        self, model: ModelConfig, *, parallel: ParallelConfig, temperature: float, seed: int, recompute: str = "none"
    ):
        self.temperature = temperature
        super().__init__(model, parallel=parallel, seed=seed, recompute=recompute)

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Log-probs and entropies (in nats) of the response tokens, [R] float32 each, for every micro-batch."""
        return self._collect(micro_batches, self._token_log_probs)

    def _make_model(self, architecture: Architecture, config: TransformerConfig, seed: int) -> PolicyModel:
        return PolicyModel(architecture, config)

    def _token_log_probs(self, batch: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprob(
            logits, batch.targets, temperature=self.temperature, vocab=self.vocab_size, with_entropy=True
        )
