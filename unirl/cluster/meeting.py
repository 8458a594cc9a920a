"""Where the ranks of a process group find each other: a store in the driver, which outlives every rank."""

import socket
from datetime import timedelta

import torch.distributed as dist

from unirl.cluster.worker import Meeting


class MeetingPlace:
    """A TCPStore on one address of this machine, and on no other, at a free port; gone once nothing refers to it."""

    def __init__(self, host: str, timeout_s: float):
        listening = socket.create_server((host, 0))
        port = listening.getsockname()[1]
        self._store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listening.detach(),  # the store would listen on every address
        )
        self.meeting = Meeting(host, port, timeout_s)
