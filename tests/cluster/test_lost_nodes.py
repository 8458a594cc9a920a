"""A Ray cluster of several nodes, raylets on this machine, that loses nodes and at last its head."""

import importlib.util
import os
import re
import subprocess

import pytest

from tests.cluster.conftest import TWO_RANKS, policy_bytes
from tests.cluster.test_supervised import Run, assert_equal
from tests.train.megatron.conftest import make_reference
from tests.trainer.conftest import ENVIRONMENT, wait_for_lines
from unirl.cluster.layout import RankGrid
from unirl.errors import UserError

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

from ray.cluster_utils import Cluster

from tests.cluster.fake_cluster import ray_environment
from unirl.cluster import crew
from unirl.cluster.supervised import ClusterOptions, SupervisedGroup


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with ray_environment(tmp_path_factory.mktemp("token")) as values:
        yield values


def make_cluster(*devices: int) -> Cluster:
    """A node with so many devices, for each; the first is the head."""
    cluster = Cluster()
    for count in devices:
        cluster.add_node(
            wait=False,
            num_cpus=2,
            num_gpus=count,
            include_dashboard=False,
            include_log_monitor=False,
            object_store_memory=100 * 2**20,
        )
    cluster.wait_for_nodes(timeout=120)
    return cluster


@pytest.fixture(scope="module")
def cluster(environment):
    cluster = make_cluster(0, 2, 2, 2)
    yield cluster
    cluster.shutdown()


@pytest.mark.timeout(400)
def test_a_rank_of_a_lost_node_moves_to_a_spare_one_while_there_is_one(cluster, tmp_path, monkeypatch):
    make_reference("qwen3-tied").save_pretrained(tmp_path / "model")
    told = []
    options = ClusterOptions(cluster.address, (1, 1), 120, 20, 20, None, tmp_path / "reports")
    run = Run(tmp_path, lambda models: SupervisedGroup(models, RankGrid(dp=2), options, told.append))
    try:
        undisturbed = run.train()
        before = [seat.node_id for seat in run.group._crew.seats]
        run.faults.plan("backward", 1, "node")
        assert_equal(run.train(), undisturbed)
        after = [seat.node_id for seat in run.group._crew.seats]
        assert after[0] == before[0]
        assert after[1] not in before

        monkeypatch.setattr(crew, "_HIRING_S", 5.0)
        run.faults.plan("optimizer", 1, "node")
        with pytest.raises(UserError, match=r"no other had as many free devices within 5 s: .* resume=auto"):
            run.train()
    finally:
        run.group.close()


@pytest.mark.timeout(580)
def test_a_run_whose_head_is_lost_says_so_and_goes_on_with_another(
    cluster, environment, command, train, two_ranks, tmp_path
):
    run_dir = tmp_path / "run"
    with subprocess.Popen(
        command(run_dir, *TWO_RANKS, f"cluster.address={cluster.address}"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, **environment},
    ) as driver:
        wait_for_lines(run_dir, 3, driver)
        cluster.remove_node(cluster.head_node, allow_graceful=False)
        told = driver.communicate(timeout=300)[1]
    assert driver.returncode == 2, told
    assert re.search(r"^error: the (head of the Ray|Ray of this node)", told, re.MULTILINE), told
    assert "continue with resume=auto" in told
    assert "Traceback" not in told

    another = make_cluster(2)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ENVIRONMENT, "RAY_AUTH_TOKEN_PATH", os.environ["RAY_AUTH_TOKEN_PATH"])
            finished = train(run_dir, *TWO_RANKS, f"cluster.address={another.address}", "resume=auto")
    finally:
        another.shutdown()
    assert finished.returncode == 0, finished.stderr
    assert policy_bytes(run_dir) == policy_bytes(two_ranks)
