"""The worker group on Ray: calls every rank, finds those that are lost, and brings the run back to where it was."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from unirl.cluster.berth import Berth
from unirl.cluster.calls import Call
from unirl.cluster.crew import Crew, RankFailed, WorkersLost
from unirl.cluster.hosts import open_berths
from unirl.cluster.layout import RankGrid
from unirl.cluster.meeting import MeetingPlace
from unirl.cluster.memory import StateMemory
from unirl.cluster.placement import EngineSeat, node_roles, node_sizes
from unirl.cluster.ray_worker import RayWorker
from unirl.cluster.reservation import Reservation
from unirl.cluster.seat import Seated
from unirl.cluster.session import RaySession
from unirl.cluster.stall import write_stall_report
from unirl.cluster.worker import Bucket, MakeModels
from unirl.errors import UserError

_RELEASE_S = 30.0
"""How long a survivor may take to leave a collective whose peer is gone."""

_HEAD_HEARTBEATS = 3
"""How many heartbeats Ray's head may take to answer: without it the run ends."""

_PASSED_ON = ("HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE")
"""What workers take from the driver's environment; the rest is that of Ray on their node."""


@dataclass(frozen=True)
class ClusterOptions:
    """As the keys of `cluster.*`; bundles: ranks of each node; report_dir: where stall reports are written; engines:
    servers that are to have a place in the run.
    """

    address: str | None
    bundles: tuple[int, ...]
    timeout_s: float
    heartbeat_s: float
    max_restarts: int
    object_store_gb: float | None
    report_dir: Path
    engines: tuple[EngineSeat, ...] = ()


class SupervisedGroup:
    """One Ray actor for each rank; a `WorkerGroup`.

    A worker that dies, or does not answer, is replaced; the others keep their process and make the process group and
    their models anew; every trained model goes on from the newest copy, and the call that was interrupted is made
    again. Who calls does not notice: results and weights are those of an undisturbed run, to the bit.

    Raises UserError with the last loss once workers were lost more often than `max_restarts`.
    """

    def __init__(
        self,
        make_models: MakeModels,
        grid: RankGrid,
        options: ClusterOptions,
        say: Callable[[str], None],
        worker: type[Seated] = RayWorker,
        crew: Callable[..., Crew] = Crew,
    ):
        self.grid = grid
        self._options = options
        self._say = say
        self._restarts = 0
        self._is_out_of_step = False
        """Whether a rank has failed while others went on: their collectives no longer meet."""
        sizes = node_sizes(options.bundles, options.engines)
        self._session: RaySession | None = RaySession(
            options.address, num_devices=sum(sizes), object_store_gb=options.object_store_gb
        )
        try:
            self._reservation = Reservation(sizes, node_roles(options.bundles, options.engines))
            self._crew = crew(
                worker,
                (make_models, *_driver()),
                reservation=self._reservation,
                bundles=options.bundles,
                heartbeat_s=options.heartbeat_s,
                check=partial(self._session.check, _HEAD_HEARTBEATS * options.heartbeat_s),
            )
            self._say_seats(range(grid.world_size))
            self._memory = StateMemory(self._crew, grid)
            try:
                self._start()
            except WorkersLost as lost:
                self._recover(lost)
        except BaseException:
            self.close()
            raise

    def run(self, call: Call) -> list[Any]:
        """See `WorkerGroup.run`."""
        self._session.check_node()
        if call.shares is not None:  # put once; every rank of a data-parallel index fetches the same object
            call = replace(call, shares=tuple(ray.put(share) for share in call.shares))
        results = self._supervised(lambda: self._attempt(call), call.before_retry)
        if self._options.max_restarts:  # else nothing will ever be brought back
            self._memory.note(call, replicated=self.facts[call.model].replicated)
        return [results[rank] for rank in call.answering_ranks(self.grid)]

    def stream(self, model: str, method: str, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WorkerGroup.stream`."""
        index, has_more = 0, True
        while has_more:
            self._session.check_node()
            bucket = Bucket(model, method, index, bucket_bytes)
            tensors, has_more = self._supervised(lambda bucket=bucket: self._next_bucket(bucket))
            yield from tensors
            index += 1

    def berths(self) -> list[Berth]:
        """See `WorkerGroup.berths`."""
        berths = open_berths(self._options.engines, self._crew, self._reservation, _driver())
        for number, berth in enumerate(berths):
            self._say(f"engine {number}: {berth}")
        return berths

    def close(self) -> None:
        """See `WorkerGroup.close`."""
        if self._session is not None:
            self._session.close()  # the workers end with their driver
            self._session = None

    def _supervised(self, attempt: Callable[[], Any], before_retry: Callable[[], None] | None = None) -> Any:
        """What `attempt` returns, tried again after each loss of workers."""
        if self._is_out_of_step:
            self._recover(WorkersLost("an earlier call, after the error of a rank", {}))
        while True:
            try:
                return attempt()
            except WorkersLost as lost:
                self._recover(lost)
                if before_retry is not None:
                    before_retry()

    def _attempt(self, call: Call) -> dict[int, Any]:
        calls = call.by_rank(self.grid)
        queued = {rank: self._crew.submit(rank, "call", *arguments) for rank, arguments in enumerate(calls)}
        return self._gather(queued, str(call))

    def _next_bucket(self, bucket: Bucket) -> tuple[list[tuple[str, torch.Tensor]], bool]:
        queued = {
            rank: self._crew.submit(rank, "next_bucket", bucket, rank == 0) for rank in range(self.grid.world_size)
        }
        return self._gather(queued, f"{bucket.model}.{bucket.method}")[0]

    def _gather(self, queued: dict[int, ray.ObjectRef], what: str) -> dict[int, Any]:
        try:
            return self._crew.gather(queued, what, self._options.timeout_s)
        except RankFailed as failed:
            if failed.waiting:
                report = write_stall_report(self._options.report_dir, failed, self._crew)
                self._say(f"{failed}; ranks {failed.waiting} wait for it (report: {report})")
                self._is_out_of_step = True
            raise failed.error from failed.told

    def _start(self) -> None:
        """Form the process group and make the models: on workers that run already, too."""
        size, host = self.grid.world_size, ray.util.get_node_ip_address()
        self._place = MeetingPlace(host, self._options.timeout_s) if size > 1 else None
        meeting = self._place and self._place.meeting
        queued = {rank: self._crew.submit(rank, "start", rank, size, meeting) for rank in range(size)}
        self.facts = self._gather(queued, "start")[0]

    def _recover(self, lost: WorkersLost) -> None:
        while True:
            report = write_stall_report(self._options.report_dir, lost, self._crew)
            self._restarts += 1
            if self._restarts > self._options.max_restarts:
                raise UserError(
                    f"{lost}; that is once more than cluster.max_restarts={self._options.max_restarts}: see {report}, "
                    "then continue with resume=auto"
                ) from lost
            self._say(f"{lost}; replacing and going on (report: {report})")
            before = list(self._crew.seats)
            try:
                self._crew.replace(lost.reasons)
                self._release_survivors(lost)
                self._is_out_of_step = False
                self._start()
                self._restore()
                return
            except WorkersLost as again:
                lost = again
            finally:
                self._say_seats(rank for rank, seat in enumerate(self._crew.seats) if seat != before[rank])

    def _say_seats(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._say(f"rank {rank}: {self.grid.coordinates(rank)}; {self._crew.seats[rank]}")

    def _release_survivors(self, lost: WorkersLost) -> None:
        """Let the others leave what they wait in; those that cannot are replaced, too."""
        others = [rank for rank in range(self.grid.world_size) if rank not in lost.reasons]
        stopping = {rank: self._crew.submit(rank, "stop") for rank in others}
        stuck = self._crew.unfinished(stopping, _RELEASE_S)
        if stuck:
            self._crew.replace(stuck)

    def _restore(self) -> None:
        for model, copies, calls in self._memory.replay():
            if copies is not None:
                queued = {rank: self._crew.submit(rank, "restore", model, copy) for rank, copy in copies.items()}
                self._gather(queued, f"{model}.restore")
            for call in calls:
                self._attempt(call)


def _driver() -> tuple[str, dict[str, str]]:
    """Directory and environment of this process, for those that it has started elsewhere."""
    return os.getcwd(), {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
