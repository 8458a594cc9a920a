"""Two real ranks on Ray: they agree with one process, and come back from what kills or stops them to the same bits."""

import errno
import importlib.util
import itertools
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from tests.cluster.faulty import FailingLoss, Faults, MakeModels, StrikingLoss
from tests.train.conftest import make_part
from tests.train.megatron.conftest import VOCAB, make_reference
from unirl.cluster.inprocess import InProcessGroup
from unirl.cluster.layout import RankGrid
from unirl.cluster.models import ActorProxy
from unirl.errors import UserError
from unirl.train.packing import plan_micro_batches

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

from unirl.cluster.supervised import ClusterOptions, SupervisedGroup

HEARTBEAT_S = 4.0


def make_batches(dp: int):
    """Two micro-batches for each of `dp` ranks."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    part = make_part([(ids(5), [ids(7), ids(3)]), (ids(9), [ids(4), ids(6)]), (ids(2), [ids(8), ids(5)])])
    return plan_micro_batches(part, torch.arange(len(part)), token_budget=24 if dp == 2 else 100, dp=dp)


class Run:
    """A group with its actor, started from weights in a folder."""

    def __init__(self, folder: Path, make_group):
        self.faults = Faults(folder / "faults")
        self.faults.folder.mkdir()
        self.folder = folder
        self.group = make_group(MakeModels(folder / "model", self.faults))
        self.actor = ActorProxy(self.group, "actor")
        self.saves = itertools.count()
        self.start = self.save()

    def save(self) -> Path:
        folder = self.folder / f"save-{next(self.saves)}"
        folder.mkdir()
        self.actor.save(folder)
        return folder

    def train(self) -> tuple[list, dict[str, torch.Tensor], list[str]]:
        """Two steps from the start with every kind of call; (results, final weights, what was saved)."""
        self.actor.load(self.start)
        batches, results = make_batches(self.group.grid.dp), []
        for _ in range(2):
            results.append(self.actor.log_probs(batches))
            results.append(self.actor.forward_backward(batches, StrikingLoss(self.faults)))
            results.append(self.actor.optimizer_step())
        saved = self.save()
        return results, dict(self.actor.export_weights()), sorted(path.name for path in saved.iterdir())


def assert_equal(found, expected) -> None:
    """To the bit."""
    assert repr(found[0]) == repr(expected[0])
    assert found[1].keys() == expected[1].keys()
    assert [name for name, weight in expected[1].items() if not torch.equal(found[1][name], weight)] == []
    assert found[2] == expected[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    make_reference("qwen3-tied").save_pretrained(folder / "model")
    options = ClusterOptions(
        address=None,
        bundles=(2,),
        timeout_s=60,
        heartbeat_s=HEARTBEAT_S,
        max_restarts=20,
        object_store_gb=0.2,
        report_dir=folder / "reports",
    )
    told: list[str] = []
    run = Run(folder, lambda models: SupervisedGroup(models, RankGrid(dp=2), options, told.append))
    run.told = told
    yield run
    run.group.close()


@pytest.fixture(scope="module")
def undisturbed(run):
    return run.train()


def test_two_ranks_agree_with_one_process(run, undisturbed, tmp_path):
    (tmp_path / "model").symlink_to(run.folder / "model")
    single = Run(tmp_path, InProcessGroup)
    try:
        results, weights, _ = single.train()
    finally:
        single.group.close()
    assert results[2].grad_norm == pytest.approx(undisturbed[0][2].grad_norm, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(undisturbed[1][name], weight, atol=2e-5, rtol=1e-4)


KILLED = [
    ("log_probs", 1),
    ("forward", 1),
    ("backward", 1),
    ("optimizer", 0),
    ("optimizer", 1),
    ("save", 1),
    ("sync", 0),
]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("where", "rank"), KILLED)
def test_a_killed_rank_is_replaced_and_nothing_changes(run, undisturbed, where, rank):
    check_survived(run, undisturbed, where, rank, signal.SIGKILL)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("where", "rank"), [("backward", 0), ("sync", 1)])
def test_a_stopped_rank_is_replaced_and_nothing_changes(run, undisturbed, where, rank):
    check_survived(run, undisturbed, where, rank, signal.SIGSTOP)
    report = max((run.folder / "reports").iterdir()).read_text()
    assert f"rank {rank} (pid " in report.splitlines()[0]
    assert f"has not answered for {HEARTBEAT_S:g} s" in report.splitlines()[0]
    assert "all_reduce" in report.split(f"== rank {1 - rank}")[1] or where == "sync"


def check_survived(run, undisturbed, where: str, rank: int, how: signal.Signals) -> None:
    before = [seat.pid for seat in run.group._crew.seats]
    run.faults.plan(where, rank, how)
    assert_equal(run.train(), undisturbed)
    assert run.faults.planned() == []
    after = [seat.pid for seat in run.group._crew.seats]
    assert after[rank] != before[rank]
    assert after[1 - rank] == before[1 - rank], "the survivor keeps its process"
    assert not os.path.exists(f"/proc/{before[rank]}")


def test_an_error_of_the_program_comes_as_it_is_and_the_workers_stay(run, undisturbed):
    with pytest.raises(ArithmeticError, match="no loss for") as raised:
        run.actor.forward_backward(make_batches(2), FailingLoss())
    assert "in forward_backward" in str(raised.value.__cause__), "with the traceback of the worker"
    assert_equal(run.train(), undisturbed)


@pytest.mark.timeout(180)
def test_an_error_of_one_rank_comes_first_and_the_others_do_not_hang(run, undisturbed):
    run.faults.plan("forward", 1, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as raised:
        run.actor.forward_backward(make_batches(2), StrikingLoss(run.faults))
    assert "in forward_backward" in str(raised.value.__cause__), "with the traceback of the rank"
    report = max((run.folder / "reports").iterdir()).read_text()
    assert re.match(r"actor\.forward_backward: rank 1 \(pid \d+ .*\) failed: .*CUDA out of memory", report)
    assert "all_reduce" in report.split("== rank 0")[1].split("== rank 1")[0], "what the other one waits in"
    assert "ranks [0] wait for it" in run.told[-1]
    assert_equal(run.train(), undisturbed)


@pytest.mark.timeout(180)
def test_a_file_system_that_fails_for_a_moment_costs_the_rank_alone(run, undisturbed):
    run.faults.plan("log_probs", 1, OSError(errno.EIO, os.strerror(errno.EIO), "/shared/file"))
    before = [seat.pid for seat in run.group._crew.seats]
    assert_equal(run.train(), undisturbed)
    after = [seat.pid for seat in run.group._crew.seats]
    assert after[0] == before[0]
    assert after[1] != before[1]
    pattern = r"actor\.log_probs: rank 1 \(pid .*\) failed: \[Errno 5\] Input/output error: '/shared/file'; replacing"
    assert any(re.match(pattern, line) for line in run.told)


@pytest.mark.timeout(180)
def test_it_gives_up_after_max_restarts_and_says_what_was_lost_last(run, undisturbed):
    run.group._restarts = run.group._options.max_restarts
    run.faults.plan("forward", 1, signal.SIGKILL)
    with pytest.raises(UserError, match=r"^actor\.forward_backward: rank 1 \(pid \d+ .*cluster\.max_restarts=20"):
        run.train()
