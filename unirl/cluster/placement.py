"""Which device of which node does what: arithmetic on a layout, before anything starts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from unirl.cluster.layout import Coordinates, RankGrid

Role = Literal["train", "all", "rollout"]
"""What a node does."""


class PlacementError(ValueError):
    """A layout that cannot be placed; the message names the nearest that can."""


@dataclass(frozen=True)
class TrainerSeat:
    """Where a rank of the trainer runs: the nodes of a job and the devices of a node count from 0."""

    rank: int
    node: int
    device: int
    coordinates: Coordinates


@dataclass(frozen=True)
class EngineSeat:
    """The devices of one rollout engine, all on one node."""

    engine: int
    node: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """The whole job: trainers by rank, engines by number."""

    trainers: tuple[TrainerSeat, ...]
    engines: tuple[EngineSeat, ...]

    @property
    def trainer_bundles(self) -> tuple[int, ...]:
        """Trainer ranks of each node, in the order of ranks."""
        return tuple(Counter(seat.node for seat in self.trainers).values())

    def lines(self) -> Iterator[str]:
        """A line for each rank and for each engine."""
        for seat in self.trainers:
            yield f"rank {seat.rank}: node {seat.node} device {seat.device}, {seat.coordinates}"
        for seat in self.engines:
            devices = ", ".join(map(str, seat.devices))
            yield f"engine {seat.engine}: node {seat.node} device{'s' if len(seat.devices) > 1 else ''} {devices}"


def place(
    grid: RankGrid,
    *,
    devices_per_node: int,
    engine_devices: int = 0,
    rollout_devices: int | None = None,
    num_engines: int | None = None,
) -> Placement:
    """Ranks fill the nodes in their order, so that tensor and context groups lie inside a node and replicas across.

    engine_devices: devices of one rollout engine; 0: there are none that need any.
    rollout_devices: devices of the engines alone, which follow those of the trainer (split); None: engines share the
    trainer's devices (colocate).
    num_engines: None: as many as the devices hold.

    Raises PlacementError where a tensor and context group, or an engine, would lie on two nodes, engines do not fill
    their devices, or there are more engines than devices for them.
    """
    _check_groups(grid, devices_per_node)
    trainers = tuple(
        TrainerSeat(rank, *divmod(rank, devices_per_node), grid.coordinates(rank)) for rank in range(grid.world_size)
    )
    if not engine_devices:
        return Placement(trainers, ())
    first = 0 if rollout_devices is None else grid.world_size
    count = grid.world_size if rollout_devices is None else rollout_devices
    _check_engines(first, count, engine_devices, devices_per_node)
    most = count // engine_devices
    if num_engines is not None and num_engines > most:
        raise PlacementError(f"{num_engines} engines of {engine_devices} devices do not fit {count}; at most {most} do")
    engines = (
        _engine(number, first + number * engine_devices, engine_devices, devices_per_node)
        for number in range(most if num_engines is None else num_engines)
    )
    return Placement(trainers, tuple(engines))


def shares_devices(engine: EngineSeat, bundles: Sequence[int]) -> bool:
    """Whether ranks of the trainer have the devices of the engine, too. bundles: ranks of each node, from its first
    device on.
    """
    return engine.node < len(bundles) and engine.devices[0] < bundles[engine.node]


def node_sizes(bundles: Sequence[int], engines: Sequence[EngineSeat]) -> tuple[int, ...]:
    """Devices of each node that ranks or engines use."""
    sizes = dict(enumerate(bundles))
    for seat in engines:
        sizes[seat.node] = max(sizes.get(seat.node, 0), seat.devices[-1] + 1)
    return tuple(sizes[node] for node in sorted(sizes))


def node_roles(bundles: Sequence[int], engines: Sequence[EngineSeat]) -> tuple[Role, ...]:
    """What each node does: `all` where engines share the devices of ranks, or nodes with them."""
    sampling = {seat.node for seat in engines}
    roles: list[Role] = ["all" if node in sampling or not engines else "train" for node in range(len(bundles))]
    return (*roles, *["rollout"] * (len(node_sizes(bundles, engines)) - len(bundles)))


def _engine(number: int, start: int, size: int, devices_per_node: int) -> EngineSeat:
    node, device = divmod(start, devices_per_node)
    return EngineSeat(number, node, tuple(range(device, device + size)))


def _check_groups(grid: RankGrid, devices_per_node: int) -> None:
    group = grid.tp * grid.cp
    if grid.world_size > devices_per_node and devices_per_node % group:
        raise PlacementError(
            f"a group of tp*cp = {grid.tp}*{grid.cp} = {group} devices would cross nodes of {devices_per_node}; the "
            f"nearest that fits: tp*cp = {_nearest(group, _divisors(devices_per_node))}"
        )


def _check_engines(first: int, count: int, size: int, devices_per_node: int) -> None:
    if _engines_fit(first, count, size, devices_per_node):
        return
    sizes = [other for other in range(1, devices_per_node + 1) if _engines_fit(first, count, other, devices_per_node)]
    raise PlacementError(
        f"engines of {size} devices do not fill {count} devices from device {first % devices_per_node} of node "
        f"{first // devices_per_node} on, in nodes of {devices_per_node}, without crossing nodes; the nearest that "
        f"fit: engines of {_nearest(size, sizes)}"
    )


def _engines_fit(first: int, count: int, size: int, devices_per_node: int) -> bool:
    """Whether whole engines fill the devices, none on two nodes."""
    starts = range(first, first + count, size)
    return count % size == 0 and all(start % devices_per_node + size <= devices_per_node for start in starts)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _nearest(size: int, valid: list[int]) -> str:
    """The largest of `valid` below `size` and the smallest above it."""
    below = [other for other in valid if other < size]
    above = [other for other in valid if other > size]
    return " or ".join(map(str, below[-1:] + above[:1]))
