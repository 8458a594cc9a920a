"""Placement by a real Ray: eight nodes of eight devices, which are eight raylets on this machine."""

import importlib.util
from pathlib import Path

import pytest

from unirl.cluster.layout import RankGrid
from unirl.cluster.placement import Placement, node_roles, node_sizes, place

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

import ray
from ray._raylet import AuthenticationTokenLoader
from ray.cluster_utils import Cluster

from tests.cluster.seated import Bystander
from unirl.cluster.crew import Crew, WorkersLost
from unirl.cluster.hosts import open_berths
from unirl.cluster.reservation import Reservation

FIRST_HOST = 2
DRIVER = (str(Path(__file__).parents[2]), {})


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


def make_crew(plan: Placement) -> tuple[Crew, Reservation]:
    bundles = plan.trainer_bundles
    reservation = Reservation(node_sizes(bundles, plan.engines), node_roles(bundles, plan.engines))
    return Crew(Bystander, (), reservation=reservation, bundles=bundles, heartbeat_s=60), reservation


def dismiss(crew: Crew, reservation: Reservation) -> None:
    crew.dismiss()
    reservation.release()


def assert_seated(crew: Crew, plan: Placement, addresses: list[str]) -> None:
    """Rank by rank; node n of the plan is the n-th address."""
    for found, planned in zip(crew.seats, plan.trainers, strict=True):
        assert (found.node_ip, found.device) == (addresses[planned.node], planned.device)


@pytest.mark.timeout(300)
def test_colocated_servers_sit_beside_their_ranks(nodes):
    """The flagship, with servers of every size; those of 8 devices with a host each."""
    addresses = nodes[1]
    plans = {tp: place(RankGrid(tp=4, pp=2, dp=8), devices_per_node=8, engine_devices=tp) for tp in (1, 2, 4, 8)}
    crew, reservation = make_crew(plans[8])
    for tp, plan in plans.items():
        assert_seated(crew, plan, addresses)
        assert len(plan.engines) == 64 // tp
        for seat in plan.engines:
            assert crew.devices(seat.node, seat.devices) == seat.devices
    for berth, seat in zip(open_berths(plans[8].engines, crew, reservation, DRIVER), plans[8].engines, strict=True):
        assert (berth.place.node_ip, berth.devices()) == (addresses[seat.node], seat.devices)
        assert berth.place.devices == ()  # the devices are counted once, as those of the ranks
    dismiss(crew, reservation)


@pytest.mark.timeout(300)
def test_servers_on_devices_of_their_own_take_the_last_nodes(nodes):
    """The flagship once more, half of it for servers; of the smallest, for want of memory, not all."""
    plans = {
        tp: place(RankGrid(tp=4, dp=8), devices_per_node=8, engine_devices=tp, rollout_devices=32)
        for tp in (1, 2, 4, 8)
    }
    crew, reservation = make_crew(plans[8])
    assert_seated(crew, plans[8], nodes[1])
    for plan in plans.values():
        seats = plan.engines[-16:]
        berths = open_berths(seats, crew, reservation, DRIVER)
        for berth, seat in zip(berths, seats, strict=True):
            assert (berth.place.node_ip, berth.place.devices) == (nodes[1][seat.node], seat.devices)
            berth.close()
    dismiss(crew, reservation)


@pytest.mark.timeout(300)
def test_a_node_for_both(nodes):
    plan = place(RankGrid(tp=2, dp=3), devices_per_node=4, engine_devices=2, rollout_devices=2)
    crew, reservation = make_crew(plan)
    assert_seated(crew, plan, addresses := [crew.seats[0].node_ip, crew.seats[4].node_ip])
    [berth] = open_berths(plan.engines, crew, reservation, DRIVER)
    assert (berth.place.node_ip, berth.place.devices) == (addresses[1], (2, 3))
    dismiss(crew, reservation)


@pytest.mark.timeout(300)
def test_ranks_of_a_node_that_is_lost_are_named_and_move_to_another(nodes):
    cluster, _ = nodes
    reservation = Reservation((2, 2))
    crew = Crew(Bystander, (), reservation=reservation, bundles=(2, 2), heartbeat_s=60)
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
    dismiss(crew, reservation)
