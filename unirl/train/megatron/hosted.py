"""A model in Megatron-Core with its weights from a Hugging Face folder, run over micro-batches: the base of policies
and critics, frozen or under training.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from unirl.config.schema import ModelConfig, ParallelConfig
from unirl.errors import UserError
from unirl.train.megatron.architecture import Architecture, read_architecture
from unirl.train.megatron.model import PackedModel, transformer_config
from unirl.train.megatron.runtime import ParallelRuntime
from unirl.train.megatron.weights import load_weights, resolve_folder
from unirl.train.packing import MicroBatch
from unirl.train.plan import CostModel, ParallelShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HostedModel(ABC):
    """A frozen model: weights alone, without gradients or optimizer.

    One process may hold several of the same parallel sizes. On a process without CUDA megatron-core is adapted to the
    CPU, see `platform`.

    Raises UserError for a model that is not supported or a folder that does not hold what its config says.
    """

    def __init__(self, model: ModelConfig, *, parallel: ParallelConfig, seed: int, recompute: str = "none"):
        _refuse_parallel(parallel)
        self.folder = resolve_folder(model.path)
        self.dtype = DTYPES[model.dtype]
        architecture = read_architecture(self.folder, trust_remote_code=model.trust_remote_code)
        config = transformer_config(architecture, parallel, dtype=self.dtype, recompute=recompute)
        with ExitStack() as on_error:
            self._runtime = on_error.enter_context(ParallelRuntime(parallel, seed=seed))
            self.model = self._make_model(architecture, config, seed).requires_grad_(False)
            load_weights(self.model, self.folder)
            on_error.pop_all()
        self._module: torch.nn.Module = self.model
        """What a pass runs: the model, or what wraps it."""
        self.shape = ParallelShape()
        """What the layout asks of micro-batches."""

    @property
    def vocab_size(self) -> int:
        """Token ids of the model, padding excluded."""
        return self.model.architecture.vocab_size

    @property
    def cost(self) -> CostModel:
        """What a pass over a tree costs."""
        architecture = self.model.architecture
        return CostModel.of_transformer(
            num_layers=architecture.num_layers,
            hidden_size=architecture.hidden_size,
            ffn_hidden_size=architecture.ffn_hidden_size,
            num_heads=architecture.num_heads,
            num_kv_heads=architecture.num_kv_heads,
            head_dim=architecture.head_dim,
            vocab_size=architecture.vocab_size,
        )

    def close(self) -> None:
        """Release the weights and the parallel state; the last model of a process takes the process group down."""
        self.model = self._module = None
        self._runtime.close()

    @abstractmethod
    def _make_model(self, architecture: Architecture, config: TransformerConfig, seed: int) -> PackedModel:
        """The model, before its weights are read; `seed` is for weights that no folder holds."""

    @torch.no_grad()
    def _collect(self, micro_batches: Sequence[MicroBatch], of_output: Callable) -> list:
        """`of_output(micro_batch, output of the model)` of each micro-batch, without a graph."""
        self._module.eval()

        def collect(batch: MicroBatch, output: torch.Tensor, non_loss_data: bool):
            return of_output(batch, output)

        return self._run(micro_batches, collect, forward_only=True, collect_non_loss_data=True)

    def _run(self, micro_batches: Sequence[MicroBatch], on_output: Callable, **kwargs) -> list:
        if not micro_batches:
            raise ValueError("there are no micro-batches to run")

        def forward_step(batches: Iterator[MicroBatch], model):
            batch = next(batches)
            return model(batch), partial(on_output, batch)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[self._module],
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
