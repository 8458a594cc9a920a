"""Placement by a real Ray: eight nodes of eight devices, which are eight raylets on this machine."""

import importlib.util
import os
import signal
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from unirl.cluster.layout import RankGrid
from unirl.cluster.placement import Placement, node_roles, node_sizes, place

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

import ray

from tests.cluster.fake_cluster import fake_cluster
from tests.cluster.seated import Bystander
from unirl.cluster import hosts
from unirl.cluster.berth import HostLostError
from unirl.cluster.crew import Crew, WorkersLost
from unirl.cluster.hosts import HostedProcess, open_berths
from unirl.cluster.reservation import Reservation
from unirl.rollout.sglang import ServerOptions, start_on_node

DRIVER = (str(Path(__file__).parents[2]), {})


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """The cluster and the addresses of its nodes; the driver is connected to the first."""
    roles = ["train"] * 4 + ["rollout"] * 4
    with fake_cluster(tmp_path_factory.mktemp("token"), roles=roles, num_gpus=8) as (cluster, addresses):
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error", _node_ip_address=addresses[0])
        yield cluster, addresses
        ray.shutdown()


def make_crew(plan: Placement) -> tuple[Crew, Reservation]:
    bundles = plan.trainer_bundles
    reservation = Reservation(node_sizes(bundles, plan.engines), node_roles(bundles, plan.engines))
    return Crew(Bystander, (), reservation=reservation, bundles=bundles, heartbeat_s=60), reservation


def dismiss(crew: Crew, reservation: Reservation) -> None:
    crew._kill(range(len(crew)))
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
    """The flagship once more, half of it for servers; of smaller ones, for want of memory, the last."""
    plans = {
        tp: place(RankGrid(tp=4, dp=8), devices_per_node=8, engine_devices=tp, rollout_devices=32)
        for tp in (1, 2, 4, 8)
    }
    crew, reservation = make_crew(plans[8])
    assert_seated(crew, plans[8], nodes[1])
    for plan in plans.values():
        seats = plan.engines[-8:]
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


@pytest.fixture
def make_process(tmp_path):
    """Starts what a server is started as: here a program that only sleeps."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 1000\n")
    python.chmod(0o700)
    return partial(start_on_node, ServerOptions(str(python), "model", "float32", tmp_path / "log" / "server.log"))


def end_of(process: HostedProcess, tree: list[psutil.Process]) -> list[psutil.Process]:
    """What is left of it once it counts as ended, a while later."""
    deadline = time.monotonic() + 120
    while process.is_running():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return psutil.wait_procs(tree, timeout=120)[1]


def tree_of(process: HostedProcess) -> list[psutil.Process]:
    head = psutil.Process(process.pid)
    while not (children := head.children(recursive=True)):
        time.sleep(0.1)
    return [head, *children]


@pytest.mark.timeout(300)
def test_a_server_ends_with_its_host_and_is_launched_again(nodes, make_process, monkeypatch):
    monkeypatch.setattr(hosts, "_END_S", 2.0)
    plan = place(RankGrid(), devices_per_node=2, engine_devices=1, rollout_devices=1)
    crew, reservation = make_crew(plan)
    [berth] = open_berths(plan.engines, crew, reservation, DRIVER)
    for strike in ("the process", "the host", "a host that hangs"):
        process = berth.launch(make_process)
        assert process.url.startswith(f"http://{crew.seats[0].node_ip}:")
        assert process.is_running()
        tree, host = tree_of(process), berth.place.pid
        if strike == "the process":
            tree[-1].kill()
        elif strike == "the host":
            os.kill(host, signal.SIGKILL)
        else:
            os.kill(host, signal.SIGSTOP)
            process.kill()
        assert end_of(process, tree) == []
        process.kill()
        assert ("lost" in process.log_tail()) == (strike != "the process")
        assert (berth.place is None) == (strike != "the process")
    dismiss(crew, reservation)


@pytest.mark.timeout(300)
def test_a_server_moves_from_a_lost_node_while_there_is_another(nodes, make_process, monkeypatch):
    cluster, addresses = nodes
    plan = place(RankGrid(), devices_per_node=1, engine_devices=1, rollout_devices=1)
    crew, reservation = make_crew(plan)
    [berth] = open_berths(plan.engines, crew, reservation, DRIVER)
    before = berth.place.node_ip
    process = berth.launch(make_process)
    tree = tree_of(process)
    cluster.remove_node(node_at(cluster, before), allow_graceful=False)
    assert end_of(process, tree) == []
    process.kill()
    process = berth.launch(make_process)
    assert berth.place.node_ip != before
    assert berth.place.node_ip in addresses[4:]  # nodes that train are not for servers

    others = Reservation((8, 8), ("rollout", "rollout"))
    tree = tree_of(process)
    cluster.remove_node(node_at(cluster, berth.place.node_ip), allow_graceful=False)
    assert end_of(process, tree) == []
    process.kill()
    monkeypatch.setattr(hosts, "_MOVE_S", 1.0)
    with pytest.raises(HostLostError, match="its node is lost, and within 1 s no other had 1 devices free"):
        berth.launch(make_process)
    others.release()
    dismiss(crew, reservation)


def node_at(cluster, address: str):
    return next(node for node in cluster.worker_nodes if node.node_ip_address == address)


@pytest.mark.timeout(300)
def test_a_worker_that_floods_its_log_tells_what_it_does_and_does_not_count_as_lost(nodes):
    crew, reservation = make_crew(place(RankGrid(), devices_per_node=8))
    flooding = {0: crew.submit(0, "flood", 200_000)}
    assert crew.silent([0]) == {}
    assert "in flood" in crew.stacks()[0]
    crew.gather(flooding, "flooding", timeout_s=200)
    dismiss(crew, reservation)


@pytest.mark.timeout(300)
def test_ranks_of_a_node_that_is_lost_are_named_and_move_to_another(nodes):
    cluster, _ = nodes
    reservation = Reservation((2, 2))
    crew = Crew(Bystander, (), reservation=reservation, bundles=(2, 2), heartbeat_s=60)
    before = [seat.node_ip for seat in crew.seats]
    lost = next(rank for rank in (0, 2) if before[rank] != cluster.head_node.node_ip_address)
    waiting = {rank: crew.submit(rank, "wait_s", 100.0) for rank in range(4)}
    cluster.remove_node(node_at(cluster, before[lost]), allow_graceful=False)
    with pytest.raises(WorkersLost, match=f"waiting: rank {lost} .* died.*; rank {lost + 1} .* died") as raised:
        crew.gather(waiting, "waiting", timeout_s=90)
    assert raised.value.reasons.keys() == {lost, lost + 1}
    crew.replace(raised.value.reasons)
    after = [seat.node_ip for seat in crew.seats]
    assert after[lost] == after[lost + 1] != before[lost]
    assert after[2 - lost] == before[2 - lost]
    assert crew.silent(range(4)) == {}
    dismiss(crew, reservation)
