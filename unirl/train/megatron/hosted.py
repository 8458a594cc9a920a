"""A model in Megatron-Core with its weights from a Hugging Face folder, run over micro-batches: the base of policies
and critics, frozen or under training.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from unirl.config.schema import ModelConfig, ParallelConfig
from unirl.train.megatron.architecture import Architecture, read_architecture
from unirl.train.megatron.context import gather_rows
from unirl.train.megatron.hf_folder import resolve_folder
from unirl.train.megatron.model import PackedModel, context_split, transformer_config
from unirl.train.megatron.runtime import ParallelRuntime
from unirl.train.megatron.weights import load_weights
from unirl.train.packing import MicroBatch
from unirl.train.plan import CostModel, ParallelShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HostedModel(ABC):
    """A frozen model: weights alone, without gradients or optimizer.

    On several processes this is the part of one rank, see `ParallelRuntime`: all ranks of a replica (data-parallel
    index) are called alike, with the same micro-batches. Results are returned on the last pipeline stage, [] on others;
    those of the ranks that have them are equal, `reports` picks one. Different replicas have the same number of
    micro-batches, empty ones (R = 0) included; `shape` says what the layout asks of them.

    One process may hold several of the same parallel sizes. On a process without CUDA megatron-core is adapted to the
    CPU, see `platform`.

    Raises UserError for a model that is not supported, that the parallel sizes do not divide, or a folder that does not
    hold what its config says.
    """

    def __init__(self, model: ModelConfig, *, parallel: ParallelConfig, seed: int, recompute: str = "none"):
        self.folder = resolve_folder(model.path)
        self.dtype = DTYPES[model.dtype]
        self.parallel = parallel
        architecture = read_architecture(self.folder, trust_remote_code=model.trust_remote_code)
        config = transformer_config(architecture, parallel, dtype=self.dtype, recompute=recompute)
        with ExitStack() as on_error:
            self._runtime = on_error.enter_context(ParallelRuntime(parallel, seed=seed))
            stages = [None] if parallel.vpp is None else range(parallel.vpp)
            self.chunks = [
                self._make_chunk(architecture, config, seed, vp_stage).requires_grad_(False) for vp_stage in stages
            ]
            load_weights(self.chunks, self.folder)
            for chunk in self.chunks:
                chunk.to(self._runtime.device)
            on_error.pop_all()
        self._modules: list[torch.nn.Module] = list(self.chunks)
        """What a pass runs: the chunks, or what wraps them."""
        self.shape = ParallelShape.of_layout(
            dp=self._runtime.dp,
            tp=parallel.tp,
            pp=parallel.pp,
            vpp=parallel.vpp or 1,
            cp=parallel.cp,
            sequence_parallel=parallel.sequence_parallel,
        )
        """What the layout asks of micro-batches."""

    @property
    def model(self) -> PackedModel:
        """What this process holds of the model: all of it in one process; its last chunk in the interleaved schedule,
        which is the one with the head where this is the last stage.
        """
        return self.chunks[-1]

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
            ffn_hidden_size=architecture.active_ffn_size,
            num_heads=architecture.num_heads,
            num_kv_heads=architecture.num_kv_heads,
            head_dim=architecture.head_dim,
            vocab_size=architecture.vocab_size,
        )

    @property
    def dp_rank(self) -> int:
        """Which of the replicas this process is a part of."""
        return self._runtime.dp_rank

    @property
    def reports(self) -> bool:
        """Whether the results of this process are those of its replica."""
        return self._runtime.reports

    def close(self) -> None:
        """Release the weights and the parallel state; the last model of a process takes the process group down, if this
        made it.
        """
        self.chunks, self._modules = [], []
        self._runtime.close()

    @abstractmethod
    def _make_chunk(
        self, architecture: Architecture, config: TransformerConfig, seed: int, vp_stage: int | None
    ) -> PackedModel:
        """A chunk of the model, before its weights are read; `seed` is for weights that no folder holds."""

    @torch.no_grad()
    def _collect(self, micro_batches: Sequence[MicroBatch], of_output: Callable) -> list:
        """`of_output(micro_batch, output of the model)` of each micro-batch, without a graph."""
        for module in self._modules:
            module.eval()

        def collect(batch: MicroBatch, output: torch.Tensor, non_loss_data: bool):
            return of_output(batch, output)

        return self._run(micro_batches, collect, forward_only=True, collect_non_loss_data=True)

    def _run(self, micro_batches: Sequence[MicroBatch], on_output: Callable, **kwargs) -> list:
        if not micro_batches:
            raise ValueError("there are no micro-batches to run")
        if len(micro_batches) % self.shape.count_multiple:
            raise ValueError(
                f"{len(micro_batches)} micro-batches for the interleaved schedule of {self.parallel.pp} stages: plan a "
                f"multiple of {self.shape.count_multiple}, see ParallelShape"
            )

        def forward_step(batches: Iterator[MicroBatch], module):
            batch = _on_device(next(batches), self._runtime.device)
            return module(batch), partial(on_output, batch)

        iterators = [iter(micro_batches) for _ in self._modules]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._modules,
            num_microbatches=len(micro_batches),
            seq_length=max(batch.tokens.numel() for batch in micro_batches),
            micro_batch_size=1,
            **kwargs,
        )


def of_all_rows(batch: MicroBatch, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Values of the response tokens, from this rank's [R of this rank] to all [R]; differentiable."""
    split = context_split(batch)
    if split is None:
        return values
    group = parallel_state.get_context_parallel_group()
    return tuple(gather_rows(value, split, group) for value in values)


def _on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    if device.type == "cpu":
        return batch
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    tensors = {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}
    return replace(batch, **tensors)
