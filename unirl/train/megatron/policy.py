"""A policy in Megatron-Core that says how likely tokens are; the policy under training builds on it."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from unirl.config.schema import ModelConfig, ParallelConfig
from unirl.kernels import linear_support_logprob, linear_token_logprob, support_logprob, token_logprob
from unirl.train.megatron.architecture import Architecture
from unirl.train.megatron.hosted import HostedModel, of_all_rows
from unirl.train.megatron.model import PolicyModel, context_split
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
        for chunk in self.chunks:
            chunk.stores_logits = logits_chunk_tokens is None

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Log-probs and entropies (in nats) of the response tokens, [R] float32 each, on the CPU, for every
        micro-batch; [] before the last pipeline stage.
        """
        found = self._collect(micro_batches, self._token_log_probs)
        return [(logp.cpu(), entropy.cpu()) for logp, entropy in found]

    def _make_chunk(
        self, architecture: Architecture, config: TransformerConfig, seed: int, vp_stage: int | None
    ) -> PolicyModel:
        return PolicyModel(architecture, config, vp_stage)

    @property
    def _vocab_group(self) -> dist.ProcessGroup | None:
        """The ranks over which the vocabulary is split; None where it is not."""
        return parallel_state.get_tensor_model_parallel_group() if self.parallel.tp > 1 else None

    def _token_log_probs(self, batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """output: logits [R, V], or hidden states [R, H] where the logits are not stored, of the response tokens and of
        the vocabulary of this rank -> log-probs and entropies of all response tokens [R], among the tokens that they
        were drawn from where the micro-batch says which these are.
        """
        split = context_split(batch)
        of_logits, of_hidden = token_logprob, linear_token_logprob
        rows = [batch.targets]
        if batch.support is not None:
            of_logits, of_hidden = support_logprob, linear_support_logprob
            rows.append(batch.support)
        if split is not None:
            rows = [values[split.rows] for values in rows]
        options = {
            "temperature": self.temperature,
            "vocab": self.vocab_size,
            "with_entropy": True,
            "group": self._vocab_group,
        }
        if self.logits_chunk_tokens is None:
            found = of_logits(output, *rows, **options)
        else:
            found = of_hidden(output, self.model.head_weight, *rows, chunk_tokens=self.logits_chunk_tokens, **options)
        return of_all_rows(batch, *found)
