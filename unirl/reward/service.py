"""`RewardService`: grades responses in scorer processes that are killed when an answer takes too long."""

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from unirl.errors import UserError
from unirl.reward.process import WorkerDiedError, WorkerProcess

logger = logging.getLogger(__name__)

CHUNK_ANSWERS = 16
# An idle worker takes work at once; one that has not begun after this long is stopped or stuck.
BEGIN_LIMIT_S = 10.0
MAX_DEATHS_OF_ONE_ANSWER = 2
MAX_FAILED_STARTS = 3
SHOWN_MESSAGES = 3


@dataclass(frozen=True)
class RewardStats:
    """What happened in one `RewardService.score` call.

    graded: answers with a verdict of the scorer. timeouts: answers over the time limit (reward 0).
    errors: answers without a verdict (reward NaN). worker_restarts: processes replaced, for whatever reason.
    messages: the first different errors.
    """

    graded: int = 0
    timeouts: int = 0
    errors: int = 0
    worker_restarts: int = 0
    messages: tuple[str, ...] = ()


class RewardService:
    """Grades responses with one scorer in `num_workers` killable processes.

    scorer: a built-in name (math_boxed, math_verify, reasoning_gym) or the dotted path of a class with
    `score(responses, answers)`; see `unirl.reward.scorers.Scorer`.
    timeout_s: seconds one answer may take, from the moment a worker begins with it; then the worker is killed and
    replaced, and the answer gets 0.
    max_response_chars: of a longer response, the last so many characters are graded.

    The processes end with `close()`, with the `with` block, and with this process, however it ends.
    Raises UserError where the scorer cannot be loaded.
    """

    def __init__(
        self, scorer: str, *, num_workers: int = 2, timeout_s: float = 10.0, max_response_chars: int = 200_000
    ):
        if num_workers < 1 or max_response_chars < 1 or not timeout_s > 0:
            raise ValueError(
                f"RewardService: found {num_workers=}, {timeout_s=}, {max_response_chars=}, expected all above 0"
            )
        self.scorer = scorer
        self.stats = RewardStats()
        self._timeout_s = timeout_s
        self._max_response_chars = max_response_chars
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        try:
            self._workers += [_Worker(self._start_process()) for _ in range(num_workers)]
            self._answer_field = self._workers[0].process.wait_ready()
        except WorkerDiedError as error:
            self.close()
            raise UserError(f"reward.scorer={scorer}: its process could not start: {error}") from error
        except BaseException:
            self.close()
            raise
        self._workers[0].become_ready()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the scorer processes."""
        return tuple(worker.process.pid for worker in self._workers)

    def score(self, responses: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[float]:
        """One reward for each response, in order; `records` are the prompt records that the responses answer.

        0.0 where the time limit ran out. NaN where there is no verdict: the scorer raised, or its process died twice
        with the answer. Such cases are counted in `stats`, and the first messages are logged.
        Raises UserError where a record lacks the scorer's answer field, or the scorer raises it. Calls from several
        threads take turns.
        """
        if len(responses) != len(records):
            raise ValueError(f"RewardService.score: found {len(responses)} responses and {len(records)} records")
        items = [
            (response[-self._max_response_chars :], self._answer(record))
            for response, record in zip(responses, records, strict=True)
        ]
        with self._lock:
            if not self._workers:
                raise ValueError("RewardService.score: the service is closed")
            call = _Call(items)
            try:
                while call.unfinished:
                    self._advance(call)
            finally:
                # After an error or Ctrl-C: a worker must not bring results of this call into the next.
                for worker in self._workers:
                    if worker.chunk:
                        self._replace(worker, call)
                self.stats = call.stats()
        self._log_errors(call)
        return call.rewards

    def close(self) -> None:
        """End the scorer processes."""
        while self._workers:
            self._workers.pop().process.kill()

    def __enter__(self) -> "RewardService":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, record: Mapping[str, Any]) -> Any:
        if self._answer_field is None:
            return record
        if self._answer_field not in record:
            raise UserError(
                f"reward.scorer={self.scorer} grades against the field {self._answer_field!r}, but a prompt record has "
                f"only {', '.join(sorted(record))}: add the field to the prompts, or choose another scorer"
            )
        answer = record[self._answer_field]
        return str(answer) if isinstance(answer, int | float) else answer

    def _start_process(self) -> WorkerProcess:
        return WorkerProcess(self.scorer, send_limit_s=BEGIN_LIMIT_S)

    def _advance(self, call: "_Call") -> None:
        """Hand out work, wait for something to happen, and deal with it."""
        for worker in self._workers:
            if worker.is_ready and not worker.chunk and call.pending:
                self._hand_out(worker, call)
        by_connection = {worker.process.connection: worker for worker in self._workers}
        next_deadline = min(worker.deadline for worker in self._workers)
        for connection in wait(list(by_connection), max(0.0, next_deadline - time.monotonic())):
            self._take_message(by_connection[connection], call)
        now = time.monotonic()
        for worker in self._workers:
            # A message that waits to be read was sent in time: it is read in the next round.
            if worker.deadline <= now and not worker.process.connection.poll():
                self._take_late(worker, call)

    def _hand_out(self, worker: "_Worker", call: "_Call") -> None:
        worker.chunk = call.next_chunk(len(self._workers))
        worker.has_begun = False
        worker.deadline = time.monotonic() + BEGIN_LIMIT_S
        try:
            worker.process.send([call.items[position] for position in worker.chunk])
        except WorkerDiedError as error:
            self._take_death(worker, call, error)

    def _take_message(self, worker: "_Worker", call: "_Call") -> None:
        try:
            kind, *values = worker.process.receive()
        except WorkerDiedError as error:
            self._take_death(worker, call, error)
            return
        match kind:
            case "ready":
                worker.become_ready()
            case "refused":
                raise UserError(values[0])
            case "begun":
                worker.has_begun, worker.failed_starts = True, 0
                worker.deadline = time.monotonic() + self._timeout_s
            case "graded":
                call.grade(worker.chunk.popleft(), values[0])
                worker.deadline = time.monotonic() + self._timeout_s if worker.chunk else math.inf
            case "failed":
                call.fail(worker.chunk.popleft(), values[0])
                worker.deadline = time.monotonic() + self._timeout_s if worker.chunk else math.inf

    def _take_late(self, worker: "_Worker", call: "_Call") -> None:
        if worker.has_begun:
            call.time_out(worker.chunk.popleft())
            self._replace(worker, call)
        else:
            self._take_death(worker, call, WorkerDiedError(f"scorer process {worker.process.pid} hangs"))

    def _take_death(self, worker: "_Worker", call: "_Call", error: WorkerDiedError) -> None:
        """Replace a worker that is gone. The answer it died with is tried once more, the rest of its chunk again."""
        if worker.chunk and worker.has_begun:
            call.survive_death(worker.chunk.popleft(), error)
        else:
            worker.failed_starts += 1
            if worker.failed_starts >= MAX_FAILED_STARTS:
                raise UserError(
                    f"reward.scorer={self.scorer}: {MAX_FAILED_STARTS} processes in a row did no work: {error}"
                ) from error
        self._replace(worker, call)

    def _replace(self, worker: "_Worker", call: "_Call") -> None:
        call.put_back(worker.chunk)
        call.worker_restarts += 1
        worker.process.kill()
        worker.restart(self._start_process())

    def _log_errors(self, call: "_Call") -> None:
        if call.timeouts:
            logger.warning(
                "reward: %d of %d answers took longer than reward.timeout_s=%g and count 0",
                call.timeouts,
                len(call.items),
                self._timeout_s,
            )
        if call.errors:
            shown = "; ".join(f"{message} ({count}x)" for message, count in call.shown_messages())
            logger.warning(
                "reward: %d of %d answers got no verdict and are left out: %s",
                call.errors.total(),
                len(call.items),
                shown,
            )


@dataclass
class _Worker:
    """A process and what it is at: the positions it holds, and by when it must say something."""

    process: WorkerProcess
    chunk: deque[int] = field(default_factory=deque)
    is_ready: bool = False
    has_begun: bool = False
    deadline: float = math.inf
    failed_starts: int = 0

    def __post_init__(self) -> None:
        self.restart(self.process)

    def restart(self, process: WorkerProcess) -> None:
        self.process, self.chunk = process, deque()
        self.is_ready = self.has_begun = False
        self.deadline = process.start_deadline

    def become_ready(self) -> None:
        self.is_ready, self.deadline = True, math.inf


class _Call:
    """The items of one `score` call, and what is known of them."""

    def __init__(self, items: list[tuple[str, Any]]):
        self.items = items
        self.rewards = [math.nan] * len(items)
        self.pending = deque(range(len(items)))
        self.unfinished = len(items)
        self.timeouts = self.worker_restarts = 0
        self.errors: Counter[str] = Counter()
        self._deaths: Counter[int] = Counter()

    def next_chunk(self, num_workers: int) -> deque[int]:
        """Small enough that the workers end together, large enough that they seldom wait."""
        size = min(CHUNK_ANSWERS, math.ceil(len(self.pending) / (2 * num_workers)))
        return deque(self.pending.popleft() for _ in range(size))

    def grade(self, position: int, reward: float) -> None:
        self.rewards[position] = reward
        self.unfinished -= 1

    def fail(self, position: int, message: str) -> None:
        self.errors[message] += 1
        self.grade(position, math.nan)

    def time_out(self, position: int) -> None:
        self.timeouts += 1
        self.grade(position, 0.0)

    def survive_death(self, position: int, error: WorkerDiedError) -> None:
        self._deaths[position] += 1
        if self._deaths[position] < MAX_DEATHS_OF_ONE_ANSWER:
            self.pending.appendleft(position)
        else:
            self.fail(position, f"its scorer process died {MAX_DEATHS_OF_ONE_ANSWER} times: {error}")

    def put_back(self, positions: deque[int]) -> None:
        self.pending.extendleft(reversed(positions))

    def shown_messages(self) -> list[tuple[str, int]]:
        return list(self.errors.items())[:SHOWN_MESSAGES]

    def stats(self) -> RewardStats:
        return RewardStats(
            graded=len(self.items) - self.unfinished - self.timeouts - self.errors.total(),
            timeouts=self.timeouts,
            errors=self.errors.total(),
            worker_restarts=self.worker_restarts,
            messages=tuple(message for message, _ in self.shown_messages()),
        )
