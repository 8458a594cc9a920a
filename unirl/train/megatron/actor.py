"""The policy under training: log-probs, gradients, optimizer steps, checkpoints and exports."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unirl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, StackConfig
from unirl.train.fused_loss import fused_loss, fuses
from unirl.train.megatron.hosted import of_all_rows
from unirl.train.megatron.model import context_split
from unirl.train.megatron.policy import MegatronPolicy
from unirl.train.megatron.training import Trained
from unirl.train.megatron.weights import export_hf, feed_stage, iterate_weights, stage_shapes
from unirl.train.packing import MicroBatch

LossFn = Callable[[MicroBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict]]
"""loss_fn(micro_batch, logp [R] float32, entropy [R] float32) -> (scalar loss, metrics).

The loss is already divided by denominators of the whole batch; losses of micro-batches add up.
"""


class MegatronActor(Trained, MegatronPolicy):
    """A policy with gradients and an optimizer; `total_steps` is the length of the learning-rate schedule."""

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
        super().__init__(
            model,
            parallel=parallel,
            temperature=temperature,
            seed=seed,
            recompute=stack.recompute,
            logits_chunk_tokens=stack.logits_chunk_tokens,
        )
        # The fused kernel takes logits that are stored.
        self._loss_kernel = stack.loss_kernel if stack.logits_chunk_tokens is None else "separate"
        self._start_training(optimizer, max_grad_norm=stack.max_grad_norm, total_steps=total_steps)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss_fn: LossFn) -> list[dict]:
        """Set the gradients to those of the sum of the losses of `micro_batches`, of all replicas; returns the metrics
        of each, [] before the last pipeline stage.
        """

        fused = fuses(loss_fn, self._loss_kernel)

        def loss_of(batch: MicroBatch, output: torch.Tensor):
            return (
                self._fused_loss(loss_fn, batch, output)
                if fused and batch.support is None  # it is of the whole vocabulary
                else loss_fn(batch, *self._token_log_probs(batch, output))
            )

        return self._backward(micro_batches, loss_of)

    def _fused_loss(self, loss_fn: LossFn, batch: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, dict]:
        split = context_split(batch)
        return fused_loss(
            loss_fn,
            batch,
            logits,
            temperature=self.temperature,
            vocab=self.vocab_size,
            group=self._vocab_group,
            rows=None if split is None else split.rows,
            of_all_rows=partial(of_all_rows, batch),
        )

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, copy of the full tensor) of every weight, in a fixed order, in the dtype of training.

        The vocabulary is without padding and a tied head is not repeated. Every rank runs it to its end and gets all.
        """
        return iterate_weights(self.chunks)

    def feed_weights(self, consume: Callable[[Iterator[tuple[str, torch.Tensor]]], Any], stage: int) -> Any:
        """What `consume` makes of the weights of a pipeline stage, which only the stage's first rank calls and returns;
        every rank calls this. Names, values and order are those of `export_weights`.
        """
        return feed_stage(self.chunks, consume, stage)

    def weight_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of what `feed_weights` gives this rank; it waits for no other rank."""
        return stage_shapes(self.chunks)

    def export_hf(self, folder: Path) -> None:
        """Write a new Hugging Face folder: weights, config and tokenizer; all ranks call it, rank 0 writes.

        Raises FileExistsError where it exists.
        """
        export_hf(self.chunks, self.folder, folder)
