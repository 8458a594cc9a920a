"""State in memory: training goes on from it to the bit, in every way in which an optimizer holds it."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.train.megatron.conftest import make_batches, make_reference, weighted_loss
from unirl.cluster.spawn import run_ranks
from unirl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, StackConfig
from unirl.train.megatron.actor import MegatronActor

WAYS = [("float32", False), ("bfloat16", False), ("float32", True), ("bfloat16", True)]


def make(folder: Path, dtype: str, distributed: bool) -> MegatronActor:
    return MegatronActor(
        ModelConfig(path=str(folder), dtype=dtype),
        parallel=ParallelConfig(use_distributed_optimizer=distributed),
        optimizer=OptimizerConfig(lr=1e-2),
        stack=StackConfig(),
        temperature=1.0,
        total_steps=10,
        seed=0,
    )


def step(actor: MegatronActor) -> dict[str, torch.Tensor]:
    batches = make_batches(token_budget=60)
    actor.forward_backward(batches[dist.get_rank() :: dist.get_world_size()][:1], weighted_loss)
    actor.optimizer_step()
    return dict(actor.export_weights())


def restored_runs(folder: Path) -> list[tuple[int, int]]:
    """Of each way: weights that differ from the first run's in a model that is restored, and in a new one."""
    found = []
    for dtype, distributed in WAYS:
        actor = make(folder, dtype, distributed)
        step(actor)
        state = copy.deepcopy(actor.capture())
        expected = step(actor)
        actor.restore(state)
        again = step(actor)
        actor.close()
        actor = make(folder, dtype, distributed)
        actor.restore(state)
        anew = step(actor)
        actor.close()
        found.append(
            tuple(sum(not torch.equal(run[name], expected[name]) for name in expected) for run in (again, anew))
        )
    return found


@pytest.mark.timeout(300)
def test_two_ranks_go_on_from_memory_to_the_bit(tmp_path):
    make_reference("qwen3-tied").save_pretrained(tmp_path)
    for by_way in run_ranks(restored_runs, 2, tmp_path):
        assert by_way == [(0, 0)] * len(WAYS)
