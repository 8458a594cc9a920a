"""The policy under training: log-probs, gradients, optimizer steps, checkpoints and exports."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from unirl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, StackConfig
from unirl.errors import UserError
from unirl.kernels import token_logprob
from unirl.train.megatron import state
from unirl.train.megatron.architecture import read_architecture
from unirl.train.megatron.model import PolicyModel, transformer_config
from unirl.train.megatron.optimizer import PolicyOptimizer, StepResult
from unirl.train.megatron.runtime import ParallelRuntime
from unirl.train.megatron.weights import (
    iterate_gradients,
    iterate_weights,
    load_weights,
    resolve_folder,
    write_hf_folder,
)
from unirl.train.packing import MicroBatch

LossFn = Callable[[MicroBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict]]
"""loss_fn(micro_batch, logp [R] float32, entropy [R] float32) -> (scalar loss, metrics).

The loss is already divided by denominators of the whole batch; losses of micro-batches add up.
"""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class MegatronActor:
    """A policy in Megatron-Core, made from a Hugging Face folder.

    `temperature` divides the logits before every log-prob; `total_steps` is the length of the learning-rate schedule.
    One process may hold several actors of the same parallel sizes. On a process without CUDA megatron-core is adapted
    to the CPU, see `platform`.

    Raises UserError for a model that is not supported or a folder that does not hold what its config says.
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
        self._refuse_parallel(parallel)
        self.temperature = temperature
        self.folder = resolve_folder(model.path)
        architecture = read_architecture(self.folder, trust_remote_code=model.trust_remote_code)
        dtype = DTYPES[model.dtype]
        config = transformer_config(architecture, parallel, dtype=dtype, recompute=stack.recompute)
        with ExitStack() as on_error:
            self._runtime = on_error.enter_context(ParallelRuntime(parallel, seed=seed))
            self.model = PolicyModel(architecture, config)
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

    @torch.no_grad()
    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Log-probs and entropies (in nats) of the response tokens, [R] float32 each, for every micro-batch."""
        self._ddp.eval()

        def collect(batch: MicroBatch, logits: torch.Tensor, non_loss_data: bool):
            return self._token_log_probs(batch, logits)

        return self._run(micro_batches, collect, forward_only=True, collect_non_loss_data=True)

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
        """Release the parallel state; the last actor of a process takes the process group down."""
        self._runtime.close()

    @staticmethod
    def _refuse_parallel(parallel: ParallelConfig) -> None:
        sizes = {name: getattr(parallel, name) for name in ("tp", "pp", "cp", "ep")}
        for name, size in sizes.items():
            if size != 1:
                raise UserError(f"parallel.{name}={size}: the trainer runs with parallel sizes of 1 only")
        if parallel.sequence_parallel:
            raise UserError("parallel.sequence_parallel=true needs parallel.tp > 1")

    def _run(self, micro_batches: Sequence[MicroBatch], on_logits: Callable, **kwargs) -> list:
        if not micro_batches:
            raise ValueError("there are no micro-batches to run")

        def forward_step(batches: Iterator[MicroBatch], model):
            batch = next(batches)
            return model(batch), partial(on_logits, batch)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[self._ddp],
            num_microbatches=len(micro_batches),
            seq_length=max(batch.tokens.numel() for batch in micro_batches),
            micro_batch_size=1,
            **kwargs,
        )

    def _token_log_probs(self, batch: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprob(
            logits, batch.targets, temperature=self.temperature, vocab=self.vocab_size, with_entropy=True
        )


def _finalize_undivided(chunks: list[DistributedDataParallel], num_tokens=None, **kwargs) -> None:
    """Reduce gradients over ranks. Megatron would then divide them by its count of tokens: ours are divided already."""
    finalize_model_grads(chunks, **kwargs)
