"""The folder by which a run and `python -m unirl.cluster` speak of the run's servers, from any machine that shares it.

    run_dir/pool/run.json               the run shows its servers here, again and again while it lives
    run_dir/pool/requests/ID.json       what is asked of it; taken away by the run
    run_dir/pool/replies/ID.json        its answer; taken away by who asked

Files are written aside and renamed, so that none is seen half-written. All of it is for this user alone (0700), since a
request may hold the API key of a server. Whoever can write here is the user, who could do worse to the run.
"""

import asyncio
import json
import os
import secrets
import socket
import stat
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import psutil

from unirl.errors import UserError

SIGN_OF_LIFE_S = 5.0
"""The run writes `run.json` at least so often."""

LONGEST_SILENCE_S = 90.0
"""A run that has not written it for so long is gone; clocks of machines and caches of file systems may differ a bit."""

_POLL_S = 0.5

_Kind = TypeVar("_Kind")


class RunEndedError(UserError):
    """The run that was asked ended before it answered."""


@dataclass(frozen=True)
class Presence:
    """What a run shows of itself.

    run_id: new for every start of a run. model_path: of its model, absolute on `host`. written_at: seconds since 1970.
    servers: one object each, see `Pool`; departed: name, URL and reason ("removed", "lost") of the last that have left.
    """

    run_id: str
    model_path: str
    servers: list[dict[str, Any]]
    departed: list[dict[str, str]]
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    written_at: float = field(default_factory=time.time)

    def is_alive(self) -> bool:
        """Whether its run lives, as far as can be seen from this machine."""
        if self.host == socket.gethostname() and not psutil.pid_exists(self.pid):
            return False
        return time.time() - self.written_at < LONGEST_SILENCE_S


@dataclass(frozen=True)
class Request:
    """run_id: of the run that is asked; another one leaves it alone. action, arguments: see `Pool`."""

    run_id: str
    action: str
    arguments: dict[str, Any] = field(repr=False)
    request_id: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True)
class Reply:
    """done: whether it was; text: what came of it, or why not."""

    done: bool
    text: str


class PoolFolder:
    """Both ends of it."""

    def __init__(self, path: Path):
        self.path = path
        self._presence = path / "run.json"
        self._requests = path / "requests"
        self._replies = path / "replies"

    def open(self) -> None:
        """The run's end: make the folder where it is missing, and forget what an earlier run left. Raises UserError
        where others could write to it.
        """
        for folder in (self.path, self._requests, self._replies):
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700, parents=True)
            _check_own(folder)
            folder.chmod(0o700)
        for leftover in (*self._requests.iterdir(), *self._replies.iterdir()):
            leftover.unlink(missing_ok=True)

    def show(self, presence: Presence) -> None:
        """The run's end: give a sign of life."""
        _write(self._presence, asdict(presence))

    def take_requests(self, run_id: str) -> list[Request]:
        """The run's end: what was asked of it since; what was asked of others is thrown away."""
        requests = []
        for path in sorted(self._requests.glob("*.json")):
            found = _read(path, Request)
            path.unlink(missing_ok=True)
            if found is not None and found.run_id == run_id:
                requests.append(found)
        return requests

    def reply(self, request: Request, reply: Reply) -> None:
        """The run's end: answer."""
        _write(self._replies / f"{Path(request.request_id).name}.json", asdict(reply))

    def close(self) -> None:
        """The run's end: it has ended."""
        self._presence.unlink(missing_ok=True)

    def presence(self) -> Presence | None:
        """Of the run that lives here; None where none does."""
        found = _read(self._presence, Presence)
        return found if found is not None and found.is_alive() else None

    async def ask(self, request: Request, *, timeout_s: float) -> str:
        """What came of it. Raises UserError where the run refuses, ends meanwhile, or does not answer in time."""
        _check_own(self.path)
        name = f"{request.request_id}.json"
        question, answer = self._requests / name, self._replies / name
        deadline = time.monotonic() + timeout_s
        _write(question, asdict(request))
        try:
            while (reply := _read(answer, Reply)) is None:
                present = self.presence()
                if present is None or present.run_id != request.run_id:
                    raise RunEndedError(f"the run ended before it answered ({self.path})")
                if time.monotonic() > deadline:
                    raise UserError(f"the run has not answered within {timeout_s:g} s ({self.path})")
                await asyncio.sleep(_POLL_S)
        finally:
            question.unlink(missing_ok=True)
            answer.unlink(missing_ok=True)
        if not reply.done:
            raise UserError(reply.text)
        return reply.text


def _check_own(folder: Path) -> None:
    """Raises UserError unless it is a folder of this user that is closed to all others, or can be made so."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise UserError(f"{folder} is not a folder of this user: remove it, or choose another run_dir")


def _read(path: Path, kind: type[_Kind]) -> _Kind | None:
    """None where there is no such file, or it holds something else."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(found, dict) or found.keys() != {item.name for item in fields(kind)}:
        return None
    return kind(**found)


def _write(path: Path, content: dict[str, Any]) -> None:
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(content, file)
    aside.replace(path)
