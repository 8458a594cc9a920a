"""The policy under training: log-probs, gradients, optimizer steps, checkpoints and exports."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

from unirl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, StackConfig
from unirl.train.megatron import state
from unirl.train.megatron.optimizer import PolicyOptimizer, StepResult
from unirl.train.megatron.policy import DTYPES, MegatronPolicy
from unirl.train.megatron.weights import iterate_gradients, iterate_weights, write_hf_folder
from unirl.train.packing import MicroBatch

LossFn = Callable[[MicroBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict]]
"""loss_fn(micro_batch, logp [R] float32, entropy [R] float32) -> (scalar loss, metrics).

The loss is already divided by denominators of the whole batch; losses of micro-batches add up.
"""


class MegatronActor(MegatronPolicy):
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
        super().__init__(model, parallel=parallel, temperature=temperature, seed=seed, recompute=stack.recompute)
        with ExitStack() as on_error:
            on_error.callback(self.close)
            config = self.model.requires_grad_(True).config
            self._module = self._ddp = DistributedDataParallel(
                config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), self.model
            )
            config.no_sync_func = self._ddp.no_sync
            config.finalize_model_grads_func = _finalize_undivided
            self.optimizer = PolicyOptimizer(
                self._ddp,
                optimizer,
                max_grad_norm=stack.max_grad_norm,
                total_steps=total_steps,
                dtype=DTYPES[model.dtype],
            )
            on_error.pop_all()

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss_fn: LossFn) -> list[dict]:
        """Set the gradients to those of the sum of the losses of `micro_batches`; returns the metrics of each."""
        self._ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._ddp.train()

        def loss_of(batch: MicroBatch, logits: torch.Tensor):
            loss, metrics = loss_fn(batch, *self._token_log_probs(batch, logits))
            # The count in the middle is what Megatron would divide by, see finalize_model_grads_func.
            return loss, torch.tensor(batch.targets.numel(), dtype=torch.int), metrics

        return self._run(micro_batches, loss_of)

    def optimizer_step(self) -> StepResult:
        """Clip the gradients to `stack.max_grad_norm` and update the weights.

        Where the gradient norm is not finite, weights, moments and schedule stay as they are and the result is
        `skipped`.
        """
        return self.optimizer.step()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, copy of the gradient, float32) of every weight, in the order of `export_weights`.

        After `optimizer_step` they are the clipped ones.
        """
        return iterate_gradients(self.model)

    def save(self, folder: Path) -> None:
        """Write weights, master weights, moments and step count into the existing `folder`."""
        state.save_state(self.model, self.optimizer, folder)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote: the same steps to the bit.

        The optimizer's settings are those of this actor, not of the checkpoint. Raises UserError for a checkpoint of
        another model.
        """
        state.load_state(self.model, self.optimizer, folder)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, copy of the full tensor) of every weight, in a fixed order, in the dtype of training.

        The vocabulary is without padding and a tied head is not repeated.
        """
        return iterate_weights(self.model)

    def export_hf(self, folder: Path) -> None:
        """Write a new Hugging Face folder: weights, config and tokenizer. Raises FileExistsError where it exists."""
        write_hf_folder(self.export_weights(), self.folder, folder)

    def close(self) -> None:
        """Release weights, gradients, optimizer and parallel state, see `MegatronPolicy.close`."""
        self._ddp = self.optimizer = None
        super().close()


def _finalize_undivided(chunks: list[DistributedDataParallel], num_tokens=None, **kwargs) -> None:
    """Reduce gradients over ranks. Megatron would then divide them by its count of tokens: ours are divided already."""
    finalize_model_grads(chunks, **kwargs)
