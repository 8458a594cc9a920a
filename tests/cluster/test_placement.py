"""The placement of the flagship and of odd machines, rank by rank."""

import itertools

import pytest

from unirl.cluster.layout import Coordinates, RankGrid
from unirl.cluster.placement import EngineSeat, PlacementError, TrainerSeat, place

SIZES = list(itertools.product((1, 2, 4, 8), (1, 2), (1, 2), (None, 32)))


@pytest.mark.parametrize(("tp", "pp", "cp", "rollout"), [case for case in SIZES if case[0] * case[2] <= 8])
def test_64_devices_on_8_nodes(tp, pp, cp, rollout):
    ranks = 64 - (rollout or 0)
    grid = RankGrid(tp=tp, pp=pp, cp=cp, dp=ranks // (tp * pp * cp))
    found = place(grid, devices_per_node=8, engine_devices=tp, rollout_devices=rollout)
    expected = itertools.product(range(pp), range(grid.dp), range(cp), range(tp))  # tp counts fastest
    for rank, (p, d, c, t) in enumerate(expected):
        seat = TrainerSeat(rank, rank // 8, rank % 8, Coordinates(dp=d, pp=p, cp=c, tp=t))
        assert found.trainers[rank] == seat
        assert grid.rank(dp=d, pp=p, cp=c, tp=t) == rank
    assert len(found.trainers) == ranks
    for p, d in itertools.product(range(pp), range(grid.dp)):  # a tensor and context group is on one node
        group = [seat.node for seat in found.trainers if (seat.coordinates.pp, seat.coordinates.dp) == (p, d)]
        assert len(group) == tp * cp
        assert len(set(group)) == 1
    first = 0 if rollout is None else 32
    devices = [(seat.node, device) for seat in found.engines for device in seat.devices]
    assert devices == [divmod(device, 8) for device in range(first, 64)]
    assert {len(seat.devices) for seat in found.engines} == {tp}


def test_nodes_of_another_size_and_a_node_for_both():
    found = place(RankGrid(tp=2, dp=3), devices_per_node=4, engine_devices=2, rollout_devices=2)
    assert found.trainer_bundles == (4, 2)
    assert found.engines == (EngineSeat(0, 1, (2, 3)),)
    assert list(found.lines())[-2:] == ["rank 5: node 1 device 1, dp=2 pp=0 cp=0 tp=1", "engine 0: node 1 devices 2, 3"]


@pytest.mark.parametrize(
    ("grid", "options", "message"),
    [
        (RankGrid(tp=16, dp=4), {"devices_per_node": 8}, "crosses? nodes of 8.*tp\\*cp = 8"),
        (RankGrid(tp=3, dp=8), {"devices_per_node": 8}, "tp\\*cp = 2 or 4"),
        (RankGrid(dp=16), {"devices_per_node": 8, "engine_devices": 3}, "engines of 2 or 4"),
        (RankGrid(dp=8), {"devices_per_node": 8, "engine_devices": 16, "rollout_devices": 16}, "engines of 8$"),
        (RankGrid(dp=6), {"devices_per_node": 8, "engine_devices": 4, "rollout_devices": 10}, "engines of 2$"),
    ],
)
def test_what_cannot_be_placed_names_the_nearest(grid, options, message):
    with pytest.raises(PlacementError, match=message.replace("crosses?", "cross")):
        place(grid, **options)


def test_who_reports_and_who_holds_the_same():
    grid = RankGrid(tp=2, pp=2, cp=2, dp=2)
    assert grid.reporting_ranks == (8, 12)
    assert grid.outer_replicas(9) == (9, 15)
    with pytest.raises(ValueError, match="expected 0 to 15"):
        grid.coordinates(16)
