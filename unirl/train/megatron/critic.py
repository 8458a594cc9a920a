"""The critic under training: values, gradients, optimizer steps, checkpoints."""

from collections.abc import Callable, Sequence

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from unirl.train.megatron.architecture import Architecture
from unirl.train.megatron.model import ValueModel
from unirl.train.megatron.trained import TrainedModel
from unirl.train.packing import MicroBatch

ValueLossFn = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, dict]]
"""loss_fn(micro_batch, values [R] float32) -> (scalar loss, metrics); losses of micro-batches add up."""


class MegatronCritic(TrainedModel):
    """A value model in Megatron-Core: the trunk of the Hugging Face folder `model.path` and a new scalar head.

    The value of a response token is V(state before the token is drawn): of the hidden state that predicts it.
    """

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss_fn: ValueLossFn) -> list[dict]:
        """Set the gradients to those of the sum of the losses of `micro_batches`; returns the metrics of each."""
        return self._train(micro_batches, loss_fn)

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Values of the response tokens, [R] float32, for every micro-batch."""
        return self._evaluate(micro_batches, lambda batch, values: values)

    def _make_model(self, architecture: Architecture, config: TransformerConfig, seed: int) -> ValueModel:
        return ValueModel(architecture, config, seed=seed)
