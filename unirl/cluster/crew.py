"""The Ray actors of a run's ranks: hired, seated in the order of their devices, watched while they work, replaced."""

import errno
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from unirl.cluster.processes import kill_process
from unirl.cluster.reservation import Reservation
from unirl.cluster.seat import WATCH, Seat, Seated
from unirl.errors import UserError

_HIRING_S = 300.0
"""How long processes may take to come up."""


_HIRING_ATTEMPTS, _HIRING_PAUSE_S = 4, 3.0

_LAST_WORDS_S = 1.0
"""How much longer than the others a lost worker has to tell what it is doing."""

_PASSING = (errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ENOTCONN)
"""Errors of a file system, of the network or of a disk, that may be gone on the next attempt; a full disk is none."""


class WorkersLost(RuntimeError):
    """Ranks that died or hang, with what is known of each; none where only their process group broke."""

    def __init__(self, what: str, reasons: Mapping[int, str]):
        self.reasons = dict(reasons)
        told = "; ".join(f"rank {rank} {reason}" for rank, reason in sorted(self.reasons.items()))
        super().__init__(f"{what}: {told or 'the process group broke, though every worker answers'}")


class RankFailed(RuntimeError):
    """A rank raised an error of the program, and `waiting` others did not end: they may wait for it."""

    def __init__(self, what: str, rank: int, seat: Seat, error: BaseException, told: BaseException, waiting: list[int]):
        self.reasons = {rank: f"({seat}) failed: {_first_line(error)}"}
        self.error, self.told, self.waiting = error, told, waiting
        super().__init__(f"{what}: rank {rank} {self.reasons[rank]}")


class Crew:
    """One actor, `worker(bundle, *arguments)`, for each rank, in the order of nodes and devices.

    reservation: the nodes that have the devices. bundles: how many ranks each of the first nodes has.
    heartbeat_s: a worker that is busy for longer is asked whether it is alive, and has as long to answer.
    check: called at each heartbeat; what it raises ends the wait.
    """

    def __init__(
        self,
        worker: type[Seated],
        arguments: tuple[Any, ...],
        *,
        reservation: Reservation,
        bundles: Sequence[int],
        heartbeat_s: float,
        check: Callable[[], None] = lambda: None,
    ):
        self._check = check
        self._actor_class = ray.remote(concurrency_groups={WATCH: 2})(worker)
        self._arguments = arguments
        self._heartbeat_s = heartbeat_s
        self._reservation = reservation
        self.bundles = tuple(bundles)
        hired = [self._hire(bundle) for bundle, size in enumerate(bundles) for _ in range(size)]
        seats = _take_seats(dict(enumerate(hired)))
        order = sorted(range(len(hired)), key=lambda number: (seats[number].bundle, seats[number].device))
        self._actors = [hired[number] for number in order]
        self.seats = [seats[number] for number in order]

    def __len__(self) -> int:
        return len(self._actors)

    def devices(self, node: int, positions: Iterable[int]) -> tuple[int, ...]:
        """Numbers of those devices of a node's ranks that stand at `positions` among them, in ascending order."""
        taken = sorted(seat.device for seat in self.seats if seat.bundle == node)
        return tuple(taken[position] for position in positions)

    def submit(self, rank: int, method: str, *args: Any) -> ray.ObjectRef:
        """Queue the method on a rank's worker, after what was queued before; the reference of its result."""
        return getattr(self._actors[rank], method).remote(*args)

    def gather(self, references: Mapping[int, ray.ObjectRef], what: str, timeout_s: float) -> dict[int, Any]:
        """The results by rank, once all are there.

        Raises WorkersLost where a worker died, does not answer a heartbeat, is not done in time, or failed in a way
        that may pass; RankFailed where a method raised an error that is not for want of a lost worker.
        """
        futures = {rank: reference.future() for rank, reference in references.items()}
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            wait(futures.values(), timeout=max(0.0, min(self._heartbeat_s, left)), return_when=FIRST_EXCEPTION)
            busy = [rank for rank, future in futures.items() if not future.done()]
            failures = {rank: future.exception() for rank, future in futures.items() if future.done()}
            failures = {rank: error for rank, error in failures.items() if error is not None}
            if failures:
                self._explain(failures, futures, what)
            if not busy:
                return {rank: future.result() for rank, future in futures.items()}
            self._check()
            if silent := self.silent(busy):
                raise WorkersLost(what, silent)
            if time.monotonic() > deadline:
                raise WorkersLost(what, dict.fromkeys(busy, f"is not done after {timeout_s:g} s"))

    def unfinished(self, references: Mapping[int, ray.ObjectRef], timeout_s: float) -> list[int]:
        """The ranks that are not done by then, or failed."""
        futures = {rank: reference.future() for rank, reference in references.items()}
        wait(futures.values(), timeout=timeout_s)
        return [rank for rank, future in futures.items() if not future.done() or future.exception() is not None]

    def silent(self, ranks: Iterable[int]) -> dict[int, str]:
        """Those that do not answer within a heartbeat, and why."""
        pings = {rank: self.submit(rank, "seat").future() for rank in ranks}
        wait(pings.values(), timeout=self._heartbeat_s)
        reasons = {}
        for rank, ping in pings.items():
            if not ping.done():
                reasons[rank] = f"({self.seats[rank]}) has not answered for {self._heartbeat_s:g} s"
            elif ping.exception() is not None:
                reasons[rank] = f"({self.seats[rank]}) died: {_first_line(ping.exception())}"
        return reasons

    def stacks(self, lost: Iterable[int] = ()) -> dict[int, str]:
        """Of every worker that tells within a heartbeat; of the others, that they do not. Nobody waits for the lost."""
        asked = {rank: self.submit(rank, "stacks").future() for rank in range(len(self))}
        deadline = time.monotonic() + self._heartbeat_s
        lost = set(lost)
        wait([future for rank, future in asked.items() if rank not in lost], timeout=self._heartbeat_s)
        wait(asked.values(), timeout=min(_LAST_WORDS_S, max(0.0, deadline - time.monotonic())))
        return {
            rank: future.result() if future.done() and future.exception() is None else "no answer\n"
            for rank, future in asked.items()
        }

    def replace(self, ranks: Iterable[int]) -> None:
        """End these workers, whatever they do, and hire others in their place: on other nodes where theirs are lost.

        Raises WorkersLost where they do not come up.
        """
        missing = sorted(ranks)
        self._kill(missing)
        for attempt in range(_HIRING_ATTEMPTS):
            self._await_nodes(missing)
            for rank in missing:
                self._actors[rank] = self._hire(self.seats[rank].bundle)
            try:
                seats = _take_seats({rank: self._actors[rank] for rank in missing})
            except WorkersLost:
                # A worker may be known to be lost before its node is.
                if attempt == _HIRING_ATTEMPTS - 1:
                    raise
                for rank in missing:
                    ray.kill(self._actors[rank], no_restart=True)
                time.sleep(_HIRING_PAUSE_S)
            else:
                for rank, seat in seats.items():
                    self.seats[rank] = seat
                return

    def _await_nodes(self, ranks: Iterable[int]) -> None:
        """Until Ray has moved the ranks' nodes to others, where they are lost."""
        if self._reservation.wait({self.seats[rank].bundle for rank in ranks}, _HIRING_S):
            return
        self._check()
        raise UserError(
            f"a node was lost, and no other had as many free devices within {_HIRING_S:.0f} s: add one, then continue "
            "with resume=auto"
        )

    def _explain(self, failures: dict[int, BaseException], futures: dict[int, Future], what: str) -> None:
        """Raise what `failures` mean: a peer that is lost, or an error of the program."""
        self._check()
        lost = {rank: str(error) for rank, error in failures.items() if isinstance(error, RayActorError)}
        # A rank that lost its peer fails before Ray tells of the death.
        lost = {rank: f"({self.seats[rank]}) died: {_first_line(failures[rank])}" for rank in lost}
        if lost := lost | self.silent(rank for rank in range(len(self)) if rank not in lost):
            raise WorkersLost(what, lost)
        errors = {rank: _cause(error) for rank, error in failures.items()}
        own = {rank: error for rank, error in errors.items() if not _is_lost_connection(error)}
        if not own:
            raise WorkersLost(f"{what} ({_first_line(next(iter(errors.values())))})", {})
        passing = {rank: error for rank, error in own.items() if _may_pass(error)}
        if passing:
            told = {rank: f"({self.seats[rank]}) failed: {_first_line(error)}" for rank, error in passing.items()}
            raise WorkersLost(what, told)
        # The others may wait for the failed one in a collective; a moment, then they are the caller's to free.
        wait(futures.values(), timeout=min(self._heartbeat_s, 10.0))
        rank = min(own)
        waiting = [other for other, future in futures.items() if not future.done()]
        raise RankFailed(what, rank, self.seats[rank], own[rank], failures[rank], waiting)

    def _hire(self, bundle: int, **more: Any) -> Any:
        options = {"num_cpus": 0, "num_gpus": 1, "scheduling_strategy": self._reservation.on(bundle), "max_restarts": 0}
        return self._actor_class.options(**options, **more).remote(bundle, *self._arguments)

    def _kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            ray.kill(self._actors[rank], no_restart=True)
            # Ray asks the process itself first, which a stopped one does not hear.
            seat = self.seats[rank]
            kill_process(seat.node_id, seat.pid, seat.started)


def _take_seats(hired: Mapping[int, Any]) -> dict[int, Seat]:
    """Where new workers have come up. Raises WorkersLost for those that have not."""
    futures = {rank: actor.seat.remote().future() for rank, actor in hired.items()}
    wait(futures.values(), timeout=_HIRING_S, return_when=FIRST_EXCEPTION)
    missing = {rank: "is not up" for rank, future in futures.items() if not future.done()}
    failed = {rank: future.exception() for rank, future in futures.items() if future.done()}
    failed = {rank: f"did not come up: {_first_line(error)}" for rank, error in failed.items() if error is not None}
    if failed or missing:
        raise WorkersLost("new workers", failed or missing)
    return {rank: future.result() for rank, future in futures.items()}


def _cause(error: BaseException) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) else error


def _is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed for want of a peer: gloo has no class of its own for that."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(library in text for library in ("gloo", "NCCL", "TCPStore"))


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _PASSING


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
