"""What the engine asks of a way to bring weights to servers; the ways themselves are in `unirl.sync`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from unirl.errors import UserError
from unirl.rollout.sglang.checksums import ChecksumCollector
from unirl.rollout.sglang.server import Server
from unirl.rollout.weights import WeightSource, checked_weights


class WeightSyncError(UserError):
    """Servers did not take new weights, or hold others than were sent."""


@dataclass(frozen=True)
class Update:
    """New weights for servers.

    expected: names and shapes (tensors on the device "meta") that `weights` must have.
    sums: collects the checksums of what is sent, where they are due.
    """

    weights: WeightSource
    version: int
    expected: Mapping[str, torch.Tensor]
    sums: ChecksumCollector | None = None

    def __str__(self) -> str:
        return f"update to version {self.version}"

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights through this process, hashed as they pass. Raises ValueError at the end, or before, where they
        are not those expected.
        """
        weights = checked_weights(self.weights, self.expected, str(self))
        return iter(self.sums.watch(weights) if self.sums else weights)


class WeightTransfer(Protocol):
    """One `sync.mode`.

    keeps_weights: what was staged can be sent at any time; else only while the model stays as it is.
    """

    keeps_weights: bool

    def stage(self, update: Update) -> None:
        """Take up new weights.

        Raises ValueError where they are not those expected: what was staged before then stays valid.
        """

    async def send(self, servers: Sequence[Server], *, flush: bool = True) -> list[Exception | None]:
        """Load the staged weights, marked with their version, and flush the prefix caches if `flush`.

        One outcome for each server, within the limit of the transfer's own: None, the ServerLostError of a server that
        has to be revived, or the RequestRefusedError of one that will not take them. Called again, for one server,
        when that has been revived, until other weights are staged.
        """

    def close(self) -> None:
        """Free what was staged; may be called twice."""
