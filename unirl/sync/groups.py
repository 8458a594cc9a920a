"""Process groups of a sender with its servers. They outlive a sync, in the process that the sender runs in."""

import asyncio
import ipaddress
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from unirl.rollout.sglang import RequestRefusedError, ServerControl, ServerLostError
from unirl.sync.buckets import Buffers
from unirl.sync.sender import Destination

_DESTROY_LIMIT_S = 5.0


class Group:
    """This process as rank 0, and the TP ranks of `servers` in their order."""

    def __init__(self, name: str, servers: tuple[Destination, ...], backend: Any, device: torch.device):
        self.name = name
        self.servers = servers
        self.device = device
        self.buffers = Buffers(partial(torch.empty, dtype=torch.uint8, device=device))
        self._backend = backend

    def broadcast(self, tensors: Sequence[torch.Tensor], timeout: timedelta) -> None:
        """Give them to all, one after the other. Raises RuntimeError where a peer is lost or the time is over."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timeout
        backend = self._backend  # kept by this call alone once the group is aborted
        for under_way in [backend.broadcast([tensor], options) for tensor in tensors]:
            under_way.wait(timeout)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def rest(self, bucket_bytes: int) -> None:
        """At the end of a sync: buffers stay for the next one, but memory of a GPU is for the training."""
        if self.device.type == "cuda":
            self.buffers.clear()
        else:
            self.buffers.rest(bucket_bytes)

    def abort(self) -> None:
        """Leave. What is under way ends: with NCCL at once, with gloo when a peer leaves or the time is over."""
        backend, self._backend = self._backend, None
        if self.device.type == "cuda":
            backend.abort()


_groups: dict[str, Group] = {}
"""Of this process, by owner."""


def current_group(owner: str, servers: tuple[Destination, ...]) -> Group | None:
    """The owner's group, where it is of exactly these servers."""
    group = _groups.get(owner)
    return group if group is not None and group.servers == servers else None


async def drop_group(owner: str, controls: dict[str, ServerControl]) -> None:
    """Take the owner's group down, if there is one, here and on those of its servers that `controls` reaches."""
    group = _groups.pop(owner, None)
    if group is None:
        return
    group.abort()
    told = [controls[server.url] for server in group.servers if server.url in controls]
    await asyncio.gather(*(_tell_destroyed(control, group.name) for control in told))


async def _tell_destroyed(control: ServerControl, name: str) -> None:
    body = {"group_name": name}
    try:
        await control.client.post("/destroy_weights_update_group", body, timeout_s=_DESTROY_LIMIT_S)
    except (ServerLostError, RequestRefusedError):
        return  # it is being looked after, or has left the group already


@dataclass(frozen=True)
class Invitation:
    """What the members of a new group are told."""

    name: str
    host: str
    port: int
    world_size: int
    backend: str

    def body(self, rank_offset: int) -> dict[str, Any]:
        """Of `/init_weights_update_group`; `rank_offset` is the rank of the server's first TP rank."""
        return {
            "master_address": self.host,
            "master_port": self.port,
            "rank_offset": rank_offset,
            "world_size": self.world_size,
            "group_name": self.name,
            "backend": self.backend,
        }


def open_group(
    owner: str, servers: tuple[Destination, ...], timeout_s: float
) -> tuple[Invitation, Callable[[], Group]]:
    """Listen for the servers; the invitation to send to them, and the call that waits until all have come.

    NCCL where this process and all servers are on CUDA, else gloo.
    """
    host, timeout = _own_address(servers), timedelta(seconds=timeout_s)
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening.detach()
    )
    on_cuda = torch.cuda.is_available() and all(server.device == "cuda" for server in servers)
    backend = "nccl" if on_cuda else "gloo"
    world_size = 1 + sum(server.tp for server in servers)
    invitation = Invitation(f"unirl-{secrets.token_hex(8)}", host, port, world_size, backend)

    def join() -> Group:
        made, device = _make_backend(invitation, store, timeout)
        _groups[owner] = group = Group(invitation.name, servers, made, device)
        return group

    return invitation, join


def _make_backend(invitation: Invitation, store: dist.Store, timeout: timedelta) -> tuple[Any, torch.device]:
    """The member of rank 0. A group of its own beside torch's registry: there is no default group in one process.

    The prefixes are those under which torch's `_new_process_group_helper` meets on the servers.
    """
    device = torch.device("cuda" if invitation.backend == "nccl" else "cpu")
    for prefix in (invitation.name, f"{invitation.name}/", f"{device.type}/"):
        store = dist.PrefixStore(prefix, store)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, 0, invitation.world_size, timeout), device
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, 0, invitation.world_size, options), device


def _own_address(servers: Sequence[Destination]) -> str:
    """The address of this machine from which the servers can be reached, and that they can reach."""
    hosts = [urlsplit(server.url) for server in servers]
    for url in hosts:
        address = socket.gethostbyname(url.hostname)
        if not ipaddress.ip_address(address).is_loopback:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
                probe.connect((address, url.port or 80))
                return probe.getsockname()[0]
    return "127.0.0.1"


def in_daemon(function: Callable[[], Any]) -> asyncio.Future:
    """The result of `function`, run in a thread that nobody waits for, should its time be over."""
    loop, result = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    result.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, should nobody ask any more

    def settle(set_result: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            set_result(value)

    def run() -> None:
        try:
            outcome = (result.set_result, function())
        except Exception as error:  # noqa: BLE001 (whatever it is, who waits is told)
            outcome = (result.set_exception, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, daemon=True).start()
    return result
