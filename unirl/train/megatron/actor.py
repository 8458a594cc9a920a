"""The policy under training: log-probs, gradients, optimizer steps, checkpoints and exports."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from unirl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, StackConfig
from unirl.kernels import token_logprob
from unirl.train.megatron.architecture import Architecture
from unirl.train.megatron.model import PolicyModel
from unirl.train.megatron.trained import TrainedModel
from unirl.train.megatron.weights import iterate_gradients, iterate_weights, write_hf_folder
from unirl.train.packing import MicroBatch

LossFn = Callable[[MicroBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict]]
"""loss_fn(micro_batch, logp [R] float32, entropy [R] float32) -> (scalar loss, metrics).

The loss is already divided by denominators of the whole batch; losses of micro-batches add up.
"""


class MegatronActor(TrainedModel):
    """A policy in Megatron-Core, made from a Hugging Face folder; see `TrainedModel`.

    `temperature` divides the logits before every log-prob.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        stack: StackConfig,
        temperature: float,
        total_steps: int,
        seed: int,
    ):
        self.temperature = temperature
        super().__init__(model, parallel=parallel, optimizer=optimizer, stack=stack, total_steps=total_steps, seed=seed)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss_fn: LossFn) -> list[dict]:
        """Set the gradients to those of the sum of the losses of `micro_batches`; returns the metrics of each."""
        return self._train(micro_batches, lambda batch, logits: loss_fn(batch, *self._token_log_probs(batch, logits)))

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Log-probs and entropies (in nats) of the response tokens, [R] float32 each, for every micro-batch."""
        return self._evaluate(micro_batches, self._token_log_probs)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, copy of the gradient, float32) of every weight, in the order of `export_weights`.

        After `optimizer_step` they are the clipped ones.
        """
        return iterate_gradients(self.model)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, copy of the full tensor) of every weight, in a fixed order, in the dtype of training.

        The vocabulary is without padding and a tied head is not repeated.
        """
        return iterate_weights(self.model)

    def export_hf(self, folder: Path) -> None:
        """Write a new Hugging Face folder: weights, config and tokenizer. Raises FileExistsError where it exists."""
        write_hf_folder(self.export_weights(), self.folder, folder)

    def _make_model(self, architecture: Architecture, config: TransformerConfig, seed: int) -> PolicyModel:
        return PolicyModel(architecture, config)

    def _token_log_probs(self, batch: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprob(
            logits, batch.targets, temperature=self.temperature, vocab=self.vocab_size, with_entropy=True
        )
