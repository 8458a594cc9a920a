"""The devices that a run has for itself: so many of each of its nodes."""

import ipaddress
import time
from collections.abc import Iterable, Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from unirl.cluster.placement import Role
from unirl.errors import UserError

_WAIT_S = 300.0
"""How long devices may take to become free."""

ROLE_LABEL = "unirl-role"
"""Of Ray's nodes; where it is `train` or `rollout`, nodes do nothing else."""

_SELECTORS: dict[Role, dict[str, str]] = {
    "train": {ROLE_LABEL: "!rollout"},
    "all": {},
    "rollout": {ROLE_LABEL: "!train"},
}
_ORDER = tuple(_SELECTORS)


class Reservation:
    """A placement group with a bundle for each node.

    Nodes are numbered: those that train before those that only sample, full ones before others, then by their address
    as a number. A node that is lost keeps its number; Ray moves its devices to another node, if one has them free.
    """

    def __init__(self, sizes: Sequence[int], roles: Sequence[Role] = ()):
        """sizes: devices of each node, from the first; roles: what each does, where that is not the same for all.

        Raises UserError where the devices are not free in time.
        """
        roles = tuple(roles) or ("all",) * len(sizes)
        self._group = _reserve(sizes, roles)
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        taken = placement_group_table(self._group)["bundles_to_node_id"]
        # Where neither size nor label tells nodes apart, the first ones train, whichever Ray took for that.
        are_alike = len(set(sizes)) == 1 and not any(ROLE_LABEL in nodes[node]["Labels"] for node in taken.values())

        def order(bundle: int) -> tuple:
            address = ipaddress.ip_address(nodes[taken[bundle]]["NodeManagerAddress"])
            role = 0 if are_alike else _ORDER.index(roles[bundle])
            return role, -sizes[bundle], int(address), taken[bundle]

        self._bundles = sorted(range(len(sizes)), key=order)

    def on(self, node: int) -> PlacementGroupSchedulingStrategy:
        """For an actor on that node, with devices of it or without any."""
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[node])

    def wait(self, nodes: Iterable[int], timeout_s: float = _WAIT_S) -> bool:
        """Whether the nodes are there by then: not before Ray has moved the devices of lost ones to others."""
        bundles, deadline = [self._bundles[node] for node in nodes], time.monotonic() + timeout_s
        while True:
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            found = placement_group_table(self._group)["bundles_to_node_id"]
            if all(found.get(bundle) in alive for bundle in bundles):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(1)

    def release(self) -> None:
        """Give the devices back; with the session they go as well."""
        remove_placement_group(self._group)


def _reserve(sizes: Sequence[int], roles: Sequence[Role]) -> PlacementGroup:
    group = placement_group(
        [{"GPU": size} for size in sizes],
        strategy="STRICT_SPREAD" if len(sizes) > 1 else "STRICT_PACK",
        bundle_label_selector=[_SELECTORS[role] for role in roles],
    )
    if group.wait(_WAIT_S):
        return group
    remove_placement_group(group)
    raise UserError(
        f"num_devices: {_wanted(sizes, roles)} were not found within {_WAIT_S:.0f} s; the nodes of the cluster have "
        f"{_found()} devices. Free them, or change num_devices, rollout.num_devices or devices_per_node"
    )


def _wanted(sizes: Sequence[int], roles: Sequence[Role]) -> str:
    """What was asked for, in words: 2 nodes with 8 free devices each that train, and so on."""
    kinds = dict.fromkeys(zip(sizes, roles, strict=True))
    wanted = list(zip(sizes, roles, strict=True))
    purpose = {"train": " to train", "rollout": " to sample", "all": ""}
    return " and ".join(
        f"{wanted.count(kind)} nodes with {kind[0]} free devices each{purpose[kind[1]]}" for kind in kinds
    )


def _found() -> str:
    """Devices of the nodes that live, with their role where they have one."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    roles = [node["Labels"].get(ROLE_LABEL, "all") for node in alive]
    return ", ".join(
        f"{node['Resources'].get('GPU', 0):g}" + (f" ({role})" if role != "all" else "")
        for node, role in zip(alive, roles, strict=True)
    )
