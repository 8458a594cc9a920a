"""The common frame of every way to bring weights to servers: names, checksums, lost servers, refusals."""

import functools
from collections.abc import Iterable

import torch

from unirl.errors import UserError
from unirl.rollout.sglang.checksums import ChecksumCollector
from unirl.rollout.sglang.client import ServerLostError
from unirl.rollout.sglang.fleet import Fleet
from unirl.rollout.sglang.model import ModelFacts
from unirl.rollout.sglang.server import Server
from unirl.rollout.sglang.transfer import WeightSyncError, WeightTransfer
from unirl.rollout.weights import checked_weights


class Publisher:
    """Publishes weights to the servers of `fleet` by way of `transfer`.

    checksum_every: compare checksums of all weights at the first publication and every so many; 0: never.
    checksum_timeout_s: limit for a server to compute them.
    """

    def __init__(
        self,
        fleet: Fleet,
        model: ModelFacts,
        transfer: WeightTransfer,
        *,
        checksum_every: int,
        checksum_timeout_s: float,
    ):
        self._fleet = fleet
        self._model = model
        self._transfer = transfer
        self._checksum_every = checksum_every
        self._checksum_timeout_s = checksum_timeout_s
        self._num_published = 0
        self._sums: ChecksumCollector | None = None

    def stage(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take up weights. Raises ValueError where they are not the model's, and then no server sees any of them;
        UserError where checksums are due and cannot be computed.
        """
        self._sums = self._checksums_if_due()
        weights = checked_weights(weights, self._model.weights, f"update to version {version}")
        self._transfer.stage(self._sums.watch(weights) if self._sums else weights, version)
        if self._sums and self._sums.unknown:
            raise UserError(
                f"it is not known how an SGLang server stores {', '.join(self._sums.unknown[:5])}, so that checksums "
                "cannot be compared: set sync.checksum_every=0"
            )

    def _checksums_if_due(self) -> ChecksumCollector | None:
        every = self._checksum_every
        if every == 0 or self._num_published % every:
            return None
        info = self._fleet.servers[0].info
        return ChecksumCollector(
            device=info.device, dtype=getattr(torch, info.dtype), tp=info.tp, head_dim=self._model.head_dim
        )

    async def publish(self) -> None:
        """Send the staged weights to all servers; one that is lost meanwhile is revived with them.

        Raises WeightSyncError where a server refuses them or holds others afterwards, UserError where none is left.
        """
        self._fleet.restore = functools.partial(self._restore, sums=self._sums)
        async with self._fleet.all_locked():  # a revival in progress ends first
            living = self._fleet.living()
            outcomes = await self._transfer.send([server.control for server in living])
            for server, outcome in zip(living, outcomes, strict=True):
                await self._follow_up(server, outcome)
        for server in self._fleet.servers:
            server.restarts = 0
        await self._fleet.settled()
        self._num_published += 1

    async def _follow_up(self, server: Server, outcome: Exception | None) -> None:
        if isinstance(outcome, ServerLostError):
            return self._fleet.report_lost(server)
        if outcome is not None:
            raise WeightSyncError(f"{server} refused the weights: {outcome}{server.log_tail()}") from outcome
        try:
            await self._verify(server, self._sums)
        except ServerLostError:
            self._fleet.report_lost(server)

    async def _restore(self, server: Server, sums: ChecksumCollector | None) -> None:
        """Give a revived server what was published last."""
        [outcome] = await self._transfer.send([server.control])
        if outcome is not None:
            raise outcome
        await self._verify(server, sums)

    async def _verify(self, server: Server, sums: ChecksumCollector | None) -> None:
        if sums is None:
            return
        found = await server.control.checksums(timeout_s=self._checksum_timeout_s)
        for rank, (ours, theirs) in enumerate(zip(sums.ranks, found, strict=True)):
            names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                raise WeightSyncError(
                    f"{server}, TP rank {rank}: after the update {len(names)} of {len(ours)} weights differ from the "
                    f"trainer's: {', '.join(names[:5])}{more}"
                )
