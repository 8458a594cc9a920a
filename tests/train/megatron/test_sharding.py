"""Weights and gradients of real shards, on four processes, against the folder they came from."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from safetensors.torch import load_file

from tests.train.megatron.conftest import make_reference
from unirl.cluster.spawn import run_ranks
from unirl.config.schema import ParallelConfig
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
    "ep2-pp2": ("qwen3-moe", ParallelConfig(ep=2, pp=2)),
    "ep4-tp2": ("qwen3-moe", ParallelConfig(ep=4, tp=2, sequence_parallel=True)),
    "ep2-dp4": ("qwen3-moe", ParallelConfig(ep=2)),
}


def make_model(folder: Path, parallel: ParallelConfig) -> PolicyModel:
    architecture = read_architecture(folder)
    model = PolicyModel(architecture, transformer_config(architecture, parallel, dtype=torch.float32))
    load_weights([model], folder)
    return model


def on_every_rank(folders: dict[str, Path], out: Path) -> dict[str, dict]:
    return {case: round_trip(folders[family], parallel, out / case) for case, (family, parallel) in CASES.items()}


def round_trip(folder: Path, parallel: ParallelConfig, out: Path) -> dict:
    """Names that this rank was given, of each kind of receivers, and those among them that were not equal."""
    stored = load_file(folder / SINGLE)
    report = {}
    with ParallelRuntime(parallel, seed=0):
        model = make_model(folder, parallel)
        for receivers in ("all", "first", "stages"):
            pairs = list(iterate_weights([model], receivers=receivers))
            report[receivers] = [name for name, _ in pairs], [n for n, t in pairs if not torch.equal(t, stored[n])]
        export_hf([model], folder, out)
        with pytest.raises(FileExistsError, match="exists"):
            export_hf([model], folder, out)
        for distributed in (False, True):
            pairs = list(iterate_gradients([summed_gradients(make_model(folder, parallel), distributed)]))
            expected = {name: tensor * total(".experts." in name) for name, tensor in stored.items()}
            wrong = [n for n, t in pairs if not torch.allclose(t, expected[n], rtol=1e-6, atol=0)]
            report["distributed" if distributed else "reduced"] = [name for name, _ in pairs], wrong
    return report


def summed_gradients(model: PolicyModel, distributed_optimizer: bool) -> DistributedDataParallel:
    """With gradients of 1, 2, ... times the weights on the data-parallel ranks, summed over them."""
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer, overlap_grad_reduce=False
    )
    module = DistributedDataParallel(model.config, options, model)
    for parameter in model.parameters():
        group = replicas(not getattr(parameter, "allreduce", True))
        parameter.main_grad.copy_(parameter.detach() * (1 + group.rank()))
    module.finish_grad_sync()
    return module


def replicas(expert: bool) -> dist.ProcessGroup:
    if expert:
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def total(expert: bool) -> int:
    size = replicas(expert).size()
    return size * (size + 1) // 2


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(folders by family, where folders were exported to, what each rank reported)"""
    root = tmp_path_factory.mktemp("sharding")
    folders = {family: root / family for family, _ in CASES.values()}
    for family, folder in folders.items():
        make_reference(family).save_pretrained(folder)
    return folders, root / "out", run_ranks(on_every_rank, RANKS, folders, root / "out", timeout_s=120)


@pytest.mark.parametrize("case", CASES)
def test_weights_from_any_layout_are_those_of_the_folder(ran, case):
    folders, _, ranks = ran
    order = ranks[0][case]["all"][0]
    assert sorted(order) == sorted(load_file(folders[CASES[case][0]] / SINGLE))
    for rank, reports in enumerate(ranks):
        report = reports[case]
        assert not any(report[receivers][1] for receivers in ("all", "first", "stages"))
        assert report["all"][0] == order
        assert report["first"][0] == (order if rank == 0 else [])


@pytest.mark.parametrize("case", CASES)
def test_each_stage_gives_its_own_weights_on_its_first_rank(ran, case):
    ranks = ran[2]
    stages = CASES[case][1].pp
    first_ranks = range(0, RANKS, RANKS // stages)
    assert all(bool(ranks[rank][case]["stages"][0]) == (rank in first_ranks) for rank in range(RANKS))
    by_stage = [name for rank in first_ranks for name in ranks[rank][case]["stages"][0]]
    assert by_stage == ranks[0][case]["all"][0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("optimizer", ["reduced", "distributed"])
def test_gradients_are_whole_on_every_rank(ran, case, optimizer):
    for report in ran[2]:
        names, wrong = report[case][optimizer]
        assert names == report[case]["all"][0]
        assert not wrong


@pytest.mark.parametrize("case", CASES)
def test_exported_folder_is_the_one_that_was_read(ran, case):
    folders, out, _ = ran
    expected, found = load_file(folders[CASES[case][0]] / SINGLE), load_file(out / case / SINGLE)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
