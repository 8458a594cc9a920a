"""What four processes make of small models in several layouts: their part of the tests of shards and of layouts."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from safetensors.torch import load_file

from tests.train.megatron.conftest import make_batches, weighted_loss
from unirl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, StackConfig
from unirl.train.megatron.actor import MegatronActor
from unirl.train.megatron.architecture import read_architecture
from unirl.train.megatron.hf_folder import SINGLE
from unirl.train.megatron.model import PolicyModel, transformer_config
from unirl.train.megatron.runtime import ParallelRuntime
from unirl.train.megatron.weights import export_hf, iterate_gradients, iterate_weights, load_weights

RANKS = 4
CASES = {
    "tp2": ("qwen3-tied", ParallelConfig(tp=2)),
    "pp2-tied": ("qwen3-tied", ParallelConfig(pp=2)),
    "tp2-pp2-bias": ("qwen2-tied", ParallelConfig(tp=2, pp=2)),
    "tp2-cp2": ("llama3-untied", ParallelConfig(tp=2, cp=2)),
    "pp2-9-heads": ("llama-tied-9-heads", ParallelConfig(pp=2)),
    "pp2-distributed": ("llama3-untied", ParallelConfig(pp=2, use_distributed_optimizer=True)),
    "ep2-pp2": ("qwen3-moe", ParallelConfig(ep=2, pp=2)),
    "ep4-tp2": ("qwen3-moe", ParallelConfig(ep=4, tp=2, sequence_parallel=True)),
    "tp2-experts": ("qwen3-moe", ParallelConfig(tp=2, sequence_parallel=True)),
    "pp2-vpp2": ("qwen2-tied", ParallelConfig(pp=2, vpp=2)),
    "ep2-dp4": ("qwen3-moe", ParallelConfig(ep=2)),
}


def make_chunks(folder: Path, parallel: ParallelConfig) -> list[PolicyModel]:
    architecture = read_architecture(folder)
    config = transformer_config(architecture, parallel, dtype=torch.float32)
    chunks = [PolicyModel(architecture, config, stage) for stage in (range(parallel.vpp) if parallel.vpp else [None])]
    load_weights(chunks, folder)
    return chunks


def on_every_rank(folders: dict[str, Path], out: Path) -> dict[str, dict]:
    """By case: what `round_trip` and `train` return."""
    return {
        case: {"weights": round_trip(folders[family], parallel, out / case), "train": train(folders[family], parallel)}
        for case, (family, parallel) in CASES.items()
    }


def train(folder: Path, parallel: ParallelConfig) -> dict:
    """log_probs: (positions in the part, log-probs) of each micro-batch, on the rank that reports. Of a step: the norm
    of the gradients, and the gradients by name, on rank 0.
    """
    actor = MegatronActor(
        ModelConfig(path=str(folder)),
        parallel=parallel,
        optimizer=OptimizerConfig(),
        stack=StackConfig(max_grad_norm=1e9),
        temperature=1.0,
        total_steps=1,
        seed=0,
    )
    batches = make_batches(token_budget=70, **asdict(actor.shape))
    count = len(batches) // actor.shape.dp
    batches = batches[actor.dp_rank * count : (actor.dp_rank + 1) * count]
    found = actor.log_probs(batches)
    actor.forward_backward(batches, weighted_loss)
    gradients = dict(actor.gradients())
    report = {
        "log_probs": [(batch.token_positions, logp) for batch, (logp, _) in zip(batches, found, strict=False)],
        "gradients": gradients if dist.get_rank() == 0 else {},
        "grad_norm": actor.optimizer_step().grad_norm,
    }
    if not actor.reports:
        report["log_probs"] = []
    actor.close()
    return report


def round_trip(folder: Path, parallel: ParallelConfig, out: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Names that this rank was given, of each kind of receivers, and those among them that were not equal."""
    stored = load_file(folder / SINGLE)
    report = {}
    with ParallelRuntime(parallel, seed=0):
        chunks = make_chunks(folder, parallel)
        for receivers in ("all", "first", "stages"):
            pairs = list(iterate_weights(chunks, receivers=receivers))
            report[receivers] = [name for name, _ in pairs], [n for n, t in pairs if not torch.equal(t, stored[n])]
        export_hf(chunks, folder, out)
        with pytest.raises(FileExistsError, match="exists"):
            export_hf(chunks, folder, out)
        for distributed in (False, True):
            pairs = list(iterate_gradients(summed_gradients(make_chunks(folder, parallel), distributed)))
            expected = {name: tensor * total(".experts." in name) for name, tensor in stored.items()}
            wrong = [n for n, t in pairs if not torch.allclose(t, expected[n], rtol=1e-6, atol=0)]
            report["distributed" if distributed else "reduced"] = [name for name, _ in pairs], wrong
    return report


def summed_gradients(chunks: list[PolicyModel], distributed_optimizer: bool) -> list[DistributedDataParallel]:
    """With gradients of 1, 2, ... times the weights on the data-parallel ranks, summed over them."""
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer, overlap_grad_reduce=False
    )
    modules = [DistributedDataParallel(chunk.config, options, chunk) for chunk in chunks]
    for module in modules:
        for parameter in module.parameters():
            group = replicas(not getattr(parameter, "allreduce", True))
            parameter.main_grad.copy_(parameter.detach() * (1 + group.rank()))
        module.finish_grad_sync()
    return modules


def replicas(expert: bool) -> dist.ProcessGroup:
    if expert:
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def total(expert: bool) -> int:
    size = replicas(expert).size()
    return size * (size + 1) // 2
