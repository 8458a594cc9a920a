"""Placement by a real Ray: eight nodes of eight devices, which are eight raylets on this machine."""

import importlib.util

import pytest

from unirl.cluster.layout import RankGrid
from unirl.cluster.placement import place

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

import ray
from ray._raylet import AuthenticationTokenLoader
from ray.cluster_utils import Cluster

from tests.cluster.seated import Bystander
from unirl.cluster.crew import Crew, WorkersLost

FIRST_HOST = 2


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """The cluster and the addresses of its nodes; the driver is connected to the first."""
    with pytest.MonkeyPatch.context() as patch:
        token = tmp_path_factory.mktemp("token") / "token"
        token.write_text("0123456789abcdef" * 4)
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_enable_worker_prestart", "0")
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        AuthenticationTokenLoader.instance().reset_cache()  # of the token of other tests
        cluster = Cluster()
        addresses = [f"127.0.0.{FIRST_HOST + node}" for node in range(8)]
        for address in addresses:
            cluster.add_node(
                wait=False,
                num_cpus=1,
                num_gpus=8,
                include_dashboard=False,
                include_log_monitor=False,
                node_ip_address=address,
                object_store_memory=80 * 2**20,
            )
        cluster.wait_for_nodes(timeout=120)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error", _node_ip_address=addresses[0])
        yield cluster, addresses
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("grid", "devices_per_node"),
    [(RankGrid(tp=2, dp=5), 8), (RankGrid(tp=4, pp=2, dp=8), 8)],
    ids=["split: a node that trainers do not fill", "colocate: all nodes"],
)
def test_ranks_sit_where_the_plan_says(nodes, grid, devices_per_node):
    plan = place(grid, devices_per_node=devices_per_node)
    crew = Crew(Bystander, (), bundles=plan.trainer_bundles, heartbeat_s=60)
    used = sorted({seat.node_ip for seat in crew.seats}, key=lambda ip: [seat.node_ip for seat in crew.seats].index(ip))
    assert len(used) == len(plan.trainer_bundles)
    for found, planned in zip(crew.seats, plan.trainers, strict=True):
        assert (found.node_ip, found.device) == (used[planned.node], planned.device)
    if len(used) == len(nodes[1]):
        assert used == nodes[1]
    crew.dismiss()


@pytest.mark.timeout(300)
def test_a_worker_that_floods_its_log_tells_what_it_does_and_does_not_count_as_lost(nodes):
    crew = Crew(Bystander, (), bundles=(1,), heartbeat_s=60)
    flooding = {0: crew.submit(0, "flood", 200_000)}
    assert crew.silent([0]) == {}
    assert "in flood" in crew.stacks()[0]
    crew.gather(flooding, "flooding", timeout_s=200)
    crew.dismiss()


@pytest.mark.timeout(300)
def test_ranks_of_a_node_that_is_lost_are_named_and_move_to_another(nodes):
    cluster, _ = nodes
    crew = Crew(Bystander, (), bundles=(2, 2), heartbeat_s=60)
    before = [seat.node_ip for seat in crew.seats]
    lost = next(rank for rank in (0, 2) if before[rank] != cluster.head_node.node_ip_address)
    node = next(node for node in cluster.worker_nodes if node.node_ip_address == before[lost])
    waiting = {rank: crew.submit(rank, "wait_s", 100.0) for rank in range(4)}
    cluster.remove_node(node, allow_graceful=False)
    with pytest.raises(WorkersLost, match=f"waiting: rank {lost} .* died.*; rank {lost + 1} .* died") as raised:
        crew.gather(waiting, "waiting", timeout_s=90)
    assert raised.value.reasons.keys() == {lost, lost + 1}
    crew.replace(raised.value.reasons)
    after = [seat.node_ip for seat in crew.seats]
    assert after[lost] == after[lost + 1] != before[lost]
    assert after[2 - lost] == before[2 - lost]
    assert crew.silent(range(4)) == {}
    crew.dismiss()
