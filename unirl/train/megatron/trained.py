"""What policy and critic have in common: a Megatron model with its optimizer, driven over micro-batches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from unirl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, StackConfig
from unirl.errors import UserError
from unirl.train.megatron import state
from unirl.train.megatron.architecture import Architecture, read_architecture
from unirl.train.megatron.model import PackedModel, transformer_config
from unirl.train.megatron.optimizer import PolicyOptimizer, StepResult
from unirl.train.megatron.runtime import ParallelRuntime
from unirl.train.megatron.weights import load_weights, resolve_folder
from unirl.train.packing import MicroBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TrainedModel:
    """A model under training, its weights read from the Hugging Face folder `model.path`.

    `total_steps` is the length of the learning-rate schedule. One process may hold several of the same parallel
    sizes. On a process without CUDA megatron-core is adapted to the CPU, see `platform`.

    Raises UserError for a model that is not supported or a folder that does not hold what its config says.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        stack: StackConfig,
        total_steps: int,
        seed: int,
    ):
        _refuse_parallel(parallel)
        self.folder = resolve_folder(model.path)
        architecture = read_architecture(self.folder, trust_remote_code=model.trust_remote_code)
        dtype = DTYPES[model.dtype]
        config = transformer_config(architecture, parallel, dtype=dtype, recompute=stack.recompute)
        with ExitStack() as on_error:
            self._runtime = on_error.enter_context(ParallelRuntime(parallel, seed=seed))
            self.model = self._make_model(architecture, config, seed)
            load_weights(self.model, self.folder)
            self._ddp = DistributedDataParallel(
                config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), self.model
            )
            config.no_sync_func = self._ddp.no_sync
            config.finalize_model_grads_func = _finalize_undivided
            self.optimizer = PolicyOptimizer(
                self._ddp, optimizer, max_grad_norm=stack.max_grad_norm, total_steps=total_steps, dtype=dtype
            )
            on_error.pop_all()

    @property
    def vocab_size(self) -> int:
        """Token ids of the model, padding excluded."""
        return self.model.architecture.vocab_size

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

    def close(self) -> None:
        """Release the parallel state; the last model of a process takes the process group down."""
        self._runtime.close()

    def _make_model(self, architecture: Architecture, config: TransformerConfig, seed: int) -> PackedModel:
        raise NotImplementedError

    def _train(self, micro_batches: Sequence[MicroBatch], loss_of: Callable) -> list[dict]:
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

    @torch.no_grad()
    def _evaluate(self, micro_batches: Sequence[MicroBatch], collect: Callable) -> list:
        """`collect(micro_batch, output of the model)` of each micro-batch, without a graph."""
        self._ddp.eval()

        def collect_output(batch: MicroBatch, output: torch.Tensor, non_loss_data: bool):
            return collect(batch, output)

        return self._run(micro_batches, collect_output, forward_only=True, collect_non_loss_data=True)

    def _run(self, micro_batches: Sequence[MicroBatch], on_output: Callable, **kwargs) -> list:
        if not micro_batches:
            raise ValueError("there are no micro-batches to run")

        def forward_step(batches: Iterator[MicroBatch], model):
            batch = next(batches)
            return model(batch), partial(on_output, batch)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[self._ddp],
            num_microbatches=len(micro_batches),
            seq_length=max(batch.tokens.numel() for batch in micro_batches),
            micro_batch_size=1,
            **kwargs,
        )


def _refuse_parallel(parallel: ParallelConfig) -> None:
    sizes = {name: getattr(parallel, name) for name in ("tp", "pp", "cp", "ep")}
    for name, size in sizes.items():
        if size != 1:
            raise UserError(f"parallel.{name}={size}: the trainer runs with parallel sizes of 1 only")
    if parallel.sequence_parallel:
        raise UserError("parallel.sequence_parallel=true needs parallel.tp > 1")


def _finalize_undivided(chunks: list[DistributedDataParallel], num_tokens=None, **kwargs) -> None:
    """Reduce gradients over ranks. Megatron would then divide them by its count of tokens: ours are divided already."""
    finalize_model_grads(chunks, **kwargs)
