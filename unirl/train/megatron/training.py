"""What makes a hosted model a model under training: gradients, optimizer, checkpoints."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

from unirl.algorithms import Metric
from unirl.config.schema import OptimizerConfig
from unirl.train.manifest import FileSum, find_damage
from unirl.train.megatron import memory
from unirl.train.megatron.dist_checkpoint import ShardedWrite, finish_write
from unirl.train.megatron.hosted import HostedModel
from unirl.train.megatron.optimizer import PolicyOptimizer, StepResult
from unirl.train.megatron.state import TrainedState
from unirl.train.megatron.weights import iterate_gradients
from unirl.train.packing import MicroBatch


class Trained(HostedModel):
    """A hosted model under training; a class with it as a base calls `_start_training` once the model is there."""

    _saving: ShardedWrite | None = None

    def _start_training(self, optimizer: OptimizerConfig, *, max_grad_norm: float, total_steps: int) -> None:
        """`total_steps` is the length of the learning-rate schedule."""
        with ExitStack() as on_error:
            on_error.callback(self.close)
            self._modules = self._ddp = self._with_gradients()
            self.optimizer = PolicyOptimizer(
                self._ddp, optimizer, max_grad_norm=max_grad_norm, total_steps=total_steps, dtype=self.dtype
            )
            on_error.pop_all()

    def _with_gradients(self) -> list[DistributedDataParallel]:
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=self.parallel.use_distributed_optimizer,
            overlap_grad_reduce=self.parallel.overlap_grad_reduce,
        )
        config = self.chunks[0].config
        wrapped = [
            DistributedDataParallel(config, ddp_config, chunk.requires_grad_(True), disable_bucketing=index > 0)
            for index, chunk in enumerate(self.chunks)
        ]
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        config.finalize_model_grads_func = _finalize_undivided
        return wrapped

    def optimizer_step(self) -> StepResult:
        """Clip the gradients to the maximal norm and update the weights; the same result on every rank.

        Where the gradient norm, over all ranks, is not finite, weights, moments and schedule stay as they are and the
        result is `skipped`.
        """
        return self.optimizer.step()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, copy of the gradient, float32) of every weight that Hugging Face knows; every rank runs
        it to its end and gets all. After `optimizer_step` they are the clipped ones.
        """
        return iterate_gradients(self._ddp)

    def begin_save(self, folder: Path) -> None:
        """Start to write the state into the existing `folder`; training may go on at once: what is written is a copy.

        Every rank calls it, and every other method of a save. Raises RuntimeError where the last save is not finished.
        """
        self._begin_save(folder, copy=True)

    def save_done(self) -> bool:
        """Whether `finish_save` has nothing to wait for on this rank: its files are down, or it failed, or it knows of
        no save, as a process that was started anew since.
        """
        return self._saving is None or self._saving.done()

    def finish_save(self) -> dict[str, FileSum]:
        """Wait for the write on every rank and complete the folder; its files by name.

        Raises CheckpointWriteError, on every rank, where one of them could not write, or knows of no save.
        """
        writing, self._saving = self._saving, None
        return finish_write(writing)

    def save(self, folder: Path) -> dict[str, FileSum]:
        """Write the state into the existing `folder`, and wait for it; its files by name.

        Raises CheckpointWriteError.
        """
        self._begin_save(folder, copy=False)
        return self.finish_save()

    def check_files(self, folder: Path, files: Mapping[str, FileSum]) -> str | None:
        """What is wrong with this rank's share of the files of a saved state; None where they are whole."""
        share = sorted(files)[dist.get_rank() :: dist.get_world_size()]
        return find_damage(folder, {name: files[name] for name in share})

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, in this layout or another: in the same one the same steps to the bit.

        The optimizer's settings are those given here, not those of the checkpoint. Raises as `TrainedState.load`.
        """
        self._state.load(folder)

    @property
    def _state(self) -> TrainedState:
        return TrainedState(self.chunks, self.optimizer, self.parallel)

    def _begin_save(self, folder: Path, *, copy: bool) -> None:
        if self._saving is not None:
            raise RuntimeError(f"a save into {self._saving.folder} is not finished: finish_save() first")
        self._saving = self._state.begin_save(folder, copy=copy)

    @property
    def replicated(self) -> bool:
        """Whether ranks of other replicas, and of the same tensor and pipeline index, capture the same."""
        return not self.parallel.use_distributed_optimizer and self.parallel.ep == 1

    def capture(self) -> dict[str, Any]:
        """What `save` writes of this rank's part, in memory: the live tensors, to be copied before the next step."""
        return memory.capture_state(self.chunks, self.optimizer)

    def restore(self, captured: dict[str, Any]) -> None:
        """Go on from what `capture` gave: the same steps to the bit."""
        memory.restore_state(self.chunks, self.optimizer, captured)

    def close(self) -> None:
        """Release weights, gradients, optimizer and parallel state, see `HostedModel.close`; a write that goes on is
        waited for, but its checkpoint is not completed.
        """
        if self._saving is not None:
            self._saving.wait()
            self._saving = None
        self._ddp = self.optimizer = None
        super().close()

    def _backward(self, micro_batches: Sequence[MicroBatch], loss_of: Callable) -> list[dict]:
        """Set the gradients to those of the sum of `loss_of(micro_batch, output of the model)`, a pair (loss, metrics),
        over the micro-batches of all replicas; returns the metrics of each of this replica.
        """
        for chunk in self._ddp:
            chunk.zero_grad_buffer()
            chunk.train()
        self.optimizer.zero_grad()

        def counted_loss(batch: MicroBatch, output: torch.Tensor):
            loss, metrics = loss_of(batch, output)
            if not loss.requires_grad:
                loss = loss + output[:0].sum()  # so that the backward pass, with its collectives, runs on every rank
            # The count in the middle is what Megatron would divide by, see finalize_model_grads_func.
            return loss, torch.tensor(batch.targets.numel(), dtype=torch.int), _on_host(metrics)

        return self._run(micro_batches, counted_loss)


def _on_host(metrics: dict) -> dict:
    """The metrics in host memory: they go to another process."""
    return {
        name: replace(metric, value=metric.value.cpu(), count=metric.count.cpu())
        if isinstance(metric, Metric)
        else metric
        for name, metric in metrics.items()
    }


def _finalize_undivided(chunks: list[DistributedDataParallel], num_tokens=None, **kwargs) -> None:
    """Reduce gradients over ranks. Megatron would then divide them by its count of tokens: ours are divided already."""
    finalize_model_grads(chunks, **kwargs)
