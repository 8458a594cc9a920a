"""What makes a hosted model a model under training: gradients, optimizer, checkpoints."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

from unirl.config.schema import OptimizerConfig
from unirl.train.megatron import memory, state
from unirl.train.megatron.hosted import HostedModel
from unirl.train.megatron.optimizer import PolicyOptimizer, StepResult
from unirl.train.packing import MicroBatch


class Trained(HostedModel):
    """A hosted model under training; a class with it as a base calls `_start_training` once the model is there."""

    def _start_training(self, optimizer: OptimizerConfig, *, max_grad_norm: float, total_steps: int) -> None:
        """`total_steps` is the length of the learning-rate schedule."""
        with ExitStack() as on_error:
            on_error.callback(self.close)
            config = self.model.requires_grad_(True).config
            self._module = self._ddp = DistributedDataParallel(
                config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), self.model
            )
            config.no_sync_func = self._ddp.no_sync
            config.finalize_model_grads_func = _finalize_undivided
            self.optimizer = PolicyOptimizer(
                self._ddp, optimizer, max_grad_norm=max_grad_norm, total_steps=total_steps, dtype=self.dtype
            )
            on_error.pop_all()

    def optimizer_step(self) -> StepResult:
        """Clip the gradients to the maximal norm and update the weights.

        Where the gradient norm is not finite, weights, moments and schedule stay as they are and the result is
        `skipped`.
        """
        return self.optimizer.step()

    def save(self, folder: Path) -> None:
        """Write weights, master weights, moments and step count into the existing `folder`."""
        state.save_state(self.model, self.optimizer, folder)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote: the same steps to the bit.

        The optimizer's settings are those given here, not those of the checkpoint. Raises UserError for a checkpoint
        of another model.
        """
        state.load_state(self.model, self.optimizer, folder)

    def capture(self) -> dict[str, Any]:
        """What `save` writes of this rank's part, in memory: the live tensors, to be copied before the next step."""
        return memory.capture_state(self.model, self.optimizer)

    def restore(self, captured: dict[str, Any]) -> None:
        """Go on from what `capture` gave: the same steps to the bit."""
        memory.restore_state(self.model, self.optimizer, captured)

    def close(self) -> None:
        """Release weights, gradients, optimizer and parallel state, see `HostedModel.close`."""
        self._ddp = self.optimizer = None
        super().close()

    def _backward(self, micro_batches: Sequence[MicroBatch], loss_of: Callable) -> list[dict]:
        """Set the gradients to those of the sum of `loss_of(micro_batch, output of the model)`, a pair (loss, metrics);
        returns the metrics of each.
        """
        self._ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._ddp.train()

        def counted_loss(batch: MicroBatch, output: torch.Tensor):
            loss, metrics = loss_of(batch, output)
            # The count in the middle is what Megatron would divide by, see finalize_model_grads_func.
            return loss, torch.tensor(batch.targets.numel(), dtype=torch.int), metrics

        return self._run(micro_batches, counted_loss)


def _finalize_undivided(chunks: list[DistributedDataParallel], num_tokens=None, **kwargs) -> None:
    """Reduce gradients over ranks. Megatron would then divide them by its count of tokens: ours are divided already."""
    finalize_model_grads(chunks, **kwargs)
