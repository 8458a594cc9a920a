"""A real Ray cluster whose nodes are raylets on this machine, with devices on paper."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import unirl.cluster  # noqa: F401 - before Ray, which reads then what this sets

# isort: split
from ray._raylet import AuthenticationTokenLoader
from ray.cluster_utils import Cluster

FIRST_HOST = 2


@contextmanager
def ray_environment(folder: Path) -> Iterator[dict[str, str]]:
    """What a job script sets for its Ray and its driver; the token is in `folder`."""
    token = folder / "token"
    token.write_text("0123456789abcdef" * 4)
    values = {
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        AuthenticationTokenLoader.instance().reset_cache()  # of the token of other tests
        yield values


@contextmanager
def fake_cluster(folder: Path, *, roles: Sequence[str | None], num_gpus: int) -> Iterator[tuple[Cluster, list[str]]]:
    """The cluster, and the addresses of its nodes; the first is the head. `folder` holds the token.

    roles: of each node, as its label says; None: it has none.
    """
    with ray_environment(folder):
        cluster = Cluster()
        addresses = [f"127.0.0.{FIRST_HOST + node}" for node in range(len(roles))]
        try:
            for address, role in zip(addresses, roles, strict=True):
                cluster.add_node(
                    wait=False,
                    num_cpus=1,
                    num_gpus=num_gpus,
                    include_dashboard=False,
                    include_log_monitor=False,
                    node_ip_address=address,
                    object_store_memory=80 * 2**20,
                    labels={} if role is None else {"unirl-role": role},
                )
            cluster.wait_for_nodes(timeout=120)
            yield cluster, addresses
        finally:
            cluster.shutdown()
