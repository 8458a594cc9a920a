"""A policy in Megatron-Core that says how likely tokens are; the policy under training builds on it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from unirl.config.schema import ModelConfig, ParallelConfig
from unirl.errors import UserError
from unirl.kernels import token_logprob
from unirl.train.megatron.architecture import read_architecture
from unirl.train.megatron.model import PolicyModel, transformer_config
from unirl.train.megatron.runtime import ParallelRuntime
from unirl.train.megatron.weights import load_weights, resolve_folder
from unirl.train.packing import MicroBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class MegatronPolicy:
    """A policy made from a Hugging Face folder, frozen: weights alone, without gradients or optimizer.

    `temperature` divides the logits before every log-prob. One process may hold several policies of the same parallel
    sizes. On a process without CUDA megatron-core is adapted to the CPU, see `platform`.

    Raises UserError for a model that is not supported or a folder that does not hold what its config says.
    """

    def __init__(
        self, model: ModelConfig, *, parallel: ParallelConfig, temperature: float, seed: int, recompute: str = "none"
    ):
        _refuse_parallel(parallel)
        self.temperature = temperature
        self.folder = resolve_folder(model.path)
        architecture = read_architecture(self.folder, trust_remote_code=model.trust_remote_code)
        config = transformer_config(architecture, parallel, dtype=DTYPES[model.dtype], recompute=recompute)
        with ExitStack() as on_error:
            self._runtime = on_error.enter_context(ParallelRuntime(parallel, seed=seed))
            self.model = PolicyModel(architecture, config).requires_grad_(False)
            load_weights(self.model, self.folder)
            on_error.pop_all()
        self._module: torch.nn.Module = self.model
        """What a pass runs: the model, or what wraps it."""

    @property
    def vocab_size(self) -> int:
        """Token ids of the model, padding excluded."""
        return self.model.architecture.vocab_size

    @torch.no_grad()
    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Log-probs and entropies (in nats) of the response tokens, [R] float32 each, for every micro-batch."""
        self._module.eval()

        def collect(batch: MicroBatch, logits: torch.Tensor, non_loss_data: bool):
            return self._token_log_probs(batch, logits)

        return self._run(micro_batches, collect, forward_only=True, collect_non_loss_data=True)

    def close(self) -> None:
        """Release the weights and the parallel state; the last policy of a process takes the process group down."""
        self.model = self._module = None
        self._runtime.close()

    def _run(self, micro_batches: Sequence[MicroBatch], on_logits: Callable, **kwargs) -> list:
        if not micro_batches:
            raise ValueError("there are no micro-batches to run")

        def forward_step(batches: Iterator[MicroBatch], model):
            batch = next(batches)
            return model(batch), partial(on_logits, batch)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[self._module],
            num_microbatches=len(micro_batches),
            seq_length=max(batch.tokens.numel() for batch in micro_batches),
            micro_batch_size=1,
            **kwargs,
        )

    def _token_log_probs(self, batch: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprob(
            logits, batch.targets, temperature=self.temperature, vocab=self.vocab_size, with_entropy=True
        )


def _refuse_parallel(parallel: ParallelConfig) -> None:
    sizes = {name: getattr(parallel, name) for name in ("tp", "pp", "cp", "ep")}
    for name, size in sizes.items():
        if size != 1:
            raise UserError(f"parallel.{name}={size}: the trainer runs with parallel sizes of 1 only")
    if parallel.sequence_parallel:
        raise UserError("parallel.sequence_parallel=true needs parallel.tp > 1")
