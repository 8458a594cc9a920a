"""What the engine asks of a way to bring weights to servers; the ways themselves are in `unirl.sync`."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from unirl.errors import UserError
from unirl.rollout.sglang.control import ServerControl


class WeightSyncError(UserError):
    """Servers did not take new weights, or hold others than were sent."""


class WeightTransfer(Protocol):
    """One `sync.mode`."""

    def stage(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take up new weights (Hugging Face names, full tensors), each tensor as it comes.

        `weights` raises ValueError at its end where it is not the model's: what was staged before then stays valid.
        """

    async def send(self, servers: Sequence[ServerControl]) -> list[Exception | None]:
        """Load the staged weights, marked with their version, and flush the prefix caches.

        One outcome for each server, within the limit of the transfer's own: None, the ServerLostError of a server that
        has to be revived, or the RequestRefusedError of one that will not take them. Called again, for one server,
        when that has been revived, until other weights are staged.
        """

    def close(self) -> None:
        """Free what was staged; may be called twice."""
