"""The folder of a run: resolved config, metrics, samples, checkpoints."""

import fcntl
import json
import os
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import yaml

from unirl.errors import UserError
from unirl.observe.secrets import without_secrets


class RunDirectory(AbstractContextManager):
    """Writes and, on resume, trims the files of a run.

    config.yaml: resolved config. metrics.jsonl: one object a line, one line for each iteration (line 0 holds the
    evaluation before training). samples.jsonl: rollout samples, readable. checkpoints/: see `CheckpointStore`.

    No other process can hold the folder meanwhile; the lock of one that died is gone with it.

    Raises UserError where `path` already holds a run and `resume` is "never", cannot be written, or is in use.
    """

    def __init__(self, path: str | Path, *, resume: str):
        self.path = Path(path)
        self.metrics_path = self.path / "metrics.jsonl"
        self.samples_path = self.path / "samples.jsonl"
        self.checkpoints_path = self.path / "checkpoints"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # logs and samples are its user's alone
        except OSError as error:
            raise UserError(f"run_dir={self.path} cannot be made: {error.strerror}; choose another run_dir") from error
        if not os.access(self.path, os.W_OK | os.X_OK, effective_ids=True):
            raise UserError(f"run_dir={self.path} cannot be written: mend its rights, or choose another run_dir")
        self._lock = _FolderLock(self.path)
        if resume == "never" and (self.metrics_path.exists() or self.checkpoints_path.exists()):
            self.close()
            raise UserError(
                f"run_dir={self.path} already holds a run: continue it with resume=auto, or choose another run_dir"
            )

    def close(self) -> None:
        """Let another run have the folder; may be called twice."""
        self._lock.close()

    def __exit__(self, *exc_info) -> None:
        self.close()

    def write_config(self, text: str) -> list[str]:
        """The resolved config, as YAML text, less the secrets in it.

        Returns what differs from the config that stood there before, `optimizer.lr: 0.1, before 0.2`; the keys `resume`
        and `run_dir` aside, which may well differ.
        """
        text = without_secrets(text)
        with _explained(self.path / "config.yaml") as path:
            before = path.read_bytes() if path.exists() else text
            write_aside(path, text.encode())
        try:
            tree = yaml.safe_load(before)
        except yaml.YAMLError:
            tree = None
        if not isinstance(tree, dict):
            return ["what stood in config.yaml could not be read"]
        before, now = _flat(tree), _flat(yaml.safe_load(text))
        names = [name for name in {**now, **before} if name not in ("resume", "run_dir")]
        return [
            f"{name}: {now.get(name)}, before {before.get(name)}" for name in names if now.get(name) != before.get(name)
        ]

    def write_metrics(self, iteration: int, metrics: dict[str, Any]) -> None:
        """One flushed line; keys keep their order."""
        _append(self.metrics_path, [{"iteration": iteration, **metrics}])

    def write_samples(self, iteration: int, samples: Iterable[dict[str, Any]]) -> None:
        """One line per sample."""
        _append(self.samples_path, [{"iteration": iteration, **sample} for sample in samples])

    def trim(self, *, trained: int, finished: int) -> list[str]:
        """Drop what a run that goes on after iteration `trained` writes again, and lines that cannot be read.

        `finished` is the last iteration whose evaluation and line of metrics are not repeated. Returns a sentence for
        each file with lines, other than its last, that could not be read.
        """
        return [
            *_keep(self.metrics_path, lambda line: line["iteration"] <= finished),
            *_keep(self.samples_path, lambda line: line["iteration"] <= (finished if line.get("eval") else trained)),
        ]


class _FolderLock:
    """Holds a folder until closed, collected, or its process is gone, killed or not."""

    def __init__(self, folder: Path):
        # Programs that this process starts do not inherit it, and so cannot hold the folder when it is gone.
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        self.close = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            self.close()
            raise UserError(
                f"run_dir={folder} is in use by {holder}: wait for it or stop it, or choose another run_dir"
            ) from None
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted path."""
    flat: dict[str, Any] = {}
    for name, value in section.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def write_aside(path: Path, content: bytes) -> None:
    """Write a file so that a reader or a crash sees the old content or the new, nothing between."""
    aside = path.with_name(f".{path.name}.tmp")
    with open(aside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _append(path: Path, records: list[dict[str, Any]]) -> None:
    with _explained(path), open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _keep(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> Iterator[str]:
    """Leave the lines that `is_kept` in the file; yields what is to be said of the others that were dropped."""
    if not path.exists():
        return
    with _explained(path):
        # The last line lacks its end where the process died, or the disk was full, while it was written.
        lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        records = [_read_line(line) for line in lines]
        pairs = zip(lines, records, strict=True)
        write_aside(path, b"".join(line for line, record in pairs if record is not None and is_kept(record)))
    if unreadable := sum(record is None for record in records):
        yield f"{path}: {unreadable} of {len(lines)} lines could not be read and are dropped"


def _read_line(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("iteration"), int) else None


@contextmanager
def _explained(path: Path) -> Iterator[Path]:
    """An error of the file system as one that the user can mend."""
    try:
        yield path
    except OSError as error:
        raise UserError(
            f"{path} could not be written: {error.strerror}; make room, or point run_dir elsewhere; "
            "checkpoints are whole, continue with resume=auto"
        ) from error
