"""What ranks of one group do together beside training: who reports, what stops them, what they share."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.train.megatron.conftest import make_batches, make_reference, weighted_loss
from unirl.cluster.spawn import run_ranks
from unirl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, StackConfig
from unirl.errors import UserError
from unirl.train.megatron.actor import MegatronActor
from unirl.train.megatron.policy import MegatronPolicy
from unirl.train.megatron.runtime import ParallelRuntime

RANKS = 2
LAYOUTS = {
    "tp2": ParallelConfig(tp=2),
    "pp2": ParallelConfig(pp=2),
    "dp2": ParallelConfig(),
    "dp2-distributed": ParallelConfig(use_distributed_optimizer=True),
}


class PoisonOneBatch:
    """Of `weighted_loss`, NaN in the last micro-batch of the last replica alone."""

    def __init__(self, dp_rank: int, dp: int, last: int):
        self.poisoned = dp_rank == dp - 1
        self.last = last

    def __call__(self, batch, logp, entropy):
        loss, metrics = weighted_loss(batch, logp, entropy)
        poisoned = self.poisoned and int(batch.sample_positions[0]) == self.last
        return loss * (math.nan if poisoned else 1.0), metrics


def on_every_rank(folder: Path) -> dict[str, dict]:
    refused = {}
    for name, layout in {"tp3": ParallelConfig(tp=3), "ep3": ParallelConfig(ep=3)}.items():
        with pytest.raises(UserError) as error:
            ParallelRuntime(layout, seed=0)
        refused[name] = str(error.value)
    reports = {name: steps(folder, layout) for name, layout in LAYOUTS.items()}
    return {"refused": refused, "group_is_left": dist.is_initialized(), **reports}


def steps(folder: Path, parallel: ParallelConfig) -> dict:
    """A frozen policy beside the actor; a step with a NaN somewhere, then a sound one."""
    common = {"parallel": parallel, "temperature": 1.0, "seed": 0}
    model = ModelConfig(path=str(folder))
    frozen = MegatronPolicy(model, **common)
    actor = MegatronActor(
        model, **common, optimizer=OptimizerConfig(lr=1e-3), stack=StackConfig(max_grad_norm=1e6), total_steps=4
    )
    batches = make_batches(token_budget=40)
    batches = batches[: len(batches) // 2 * 2]
    own = batches[actor.dp_rank :: actor.shape.dp]
    before, kept = dict(actor.export_weights()), frozen.log_probs(own)
    actor.forward_backward(own, PoisonOneBatch(actor.dp_rank, actor.shape.dp, int(own[-1].sample_positions[0])))
    skipped = actor.optimizer_step()
    unchanged = all(torch.equal(weight, before[name]) for name, weight in actor.export_weights())
    metrics = actor.forward_backward(own, weighted_loss)
    made = actor.optimizer_step()
    after = dict(actor.export_weights())
    changed = all(not torch.equal(weight, before[name]) for name, weight in after.items())
    found = actor.log_probs(own)
    frozen_moved = any(
        not torch.equal(logp, old) for (logp, _), (old, _) in zip(frozen.log_probs(own), kept, strict=True)
    )
    with pytest.raises(RuntimeError, match="single process"):
        actor.save(folder)
    report = {
        "coordinates": (actor.dp_rank, actor.reports, actor.shape.dp),
        "skipped": skipped.skipped and math.isnan(skipped.grad_norm) and unchanged,
        "made": (made.skipped, made.lr, changed, actor.optimizer.steps),
        "grad_norm": made.grad_norm,
        "metrics": len(metrics),
        "log_probs": [logp for logp, _ in found],
        "kept": [logp for logp, _ in kept],
        "frozen_moved": frozen_moved,
        "weights": after,
    }
    frozen.close()
    actor.close()
    return report


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "model"
    make_reference("qwen3-tied").save_pretrained(folder)
    return run_ranks(on_every_rank, RANKS, folder, timeout_s=240)


def test_layouts_that_do_not_fit_the_group_are_refused_with_the_rule(ran):
    for rank in ran:
        assert "does not divide the 2 process(es)" in rank["refused"]["tp3"]
        assert "parallel.ep=3 does not divide the 2 process(es)" in rank["refused"]["ep3"]
        assert rank["group_is_left"]


@pytest.mark.parametrize(
    ("layout", "expected"),
    {
        "tp2": [(0, True, 1), (0, False, 1)],
        "pp2": [(0, False, 1), (0, True, 1)],
        "dp2": [(0, True, 2), (1, True, 2)],
    }.items(),
)
def test_one_rank_of_each_replica_reports(ran, layout, expected):
    assert [rank[layout]["coordinates"] for rank in ran] == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_come_from_the_last_stage_alone(ran, layout):
    counts = [(rank[layout]["metrics"], len(rank[layout]["log_probs"])) for rank in ran]
    if layout == "pp2":
        assert counts[0] == (0, 0)
        counts = counts[1:]
    assert all(metrics == log_probs > 0 for metrics, log_probs in counts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_gradient_that_is_not_finite_skips_the_step_on_every_rank(ran, layout):
    for rank in ran:
        assert rank[layout]["skipped"]
        assert rank[layout]["made"] == (False, 1e-3, True, 1)
    assert ran[0][layout]["grad_norm"] == ran[1][layout]["grad_norm"]
    for name, weight in ran[0][layout]["weights"].items():
        assert torch.equal(weight, ran[1][layout]["weights"][name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_frozen_policy_beside_it_stays_as_it_is(ran, layout):
    reporting = ran[-1][layout]
    assert not reporting["frozen_moved"]
    for moved, kept in zip(reporting["log_probs"], reporting["kept"], strict=True):
        assert not torch.equal(moved, kept)


def test_optimizer_offload_without_a_gpu_is_refused(make_folder, make_actor):
    folder, _ = make_folder()
    with pytest.raises(UserError, match="there is no GPU to relieve"):
        make_actor(folder, cpu_offload=True)
