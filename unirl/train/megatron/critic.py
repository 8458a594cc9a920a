"""The critic under training: values, gradients, optimizer steps, checkpoints."""

from collections.abc import Callable, Sequence

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from unirl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from unirl.train.megatron.architecture import Architecture
from unirl.train.megatron.hosted import of_all_rows
from unirl.train.megatron.model import ValueModel
from unirl.train.megatron.training import Trained
from unirl.train.packing import MicroBatch

ValueLossFn = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, dict]]
"""loss_fn(micro_batch, values [R] float32) -> (scalar loss, metrics); losses of micro-batches add up."""


class MegatronCritic(Trained):
    """A value model: the trunk of the Hugging Face folder `model.path` with a new scalar head, drawn from `seed`.

    The value of a response token is V(state before the token is drawn): of the hidden state that predicts it.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        max_grad_norm: float,
        total_steps: int,
        seed: int,
        recompute: str = "none",
    ):
        super().__init__(model, parallel=parallel, seed=seed, recompute=recompute)
        self._start_training(optimizer, max_grad_norm=max_grad_norm, total_steps=total_steps)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss_fn: ValueLossFn) -> list[dict]:
        """Set the gradients to those of the sum of the losses of `micro_batches`, of all replicas; returns the metrics
        of each, [] before the last pipeline stage.
        """
        return self._backward(micro_batches, lambda batch, values: loss_fn(batch, *of_all_rows(batch, values)))

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Values of the response tokens, [R] float32, on the CPU, for every micro-batch; [] before the last pipeline
        stage.
        """
        return self._collect(micro_batches, lambda batch, values: of_all_rows(batch, values)[0].cpu())

    def _make_chunk(
        self, architecture: Architecture, config: TransformerConfig, seed: int, vp_stage: int | None
    ) -> ValueModel:
        return ValueModel(architecture, config, vp_stage, seed=seed)
