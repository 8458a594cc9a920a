"""The folder of a run: resolved config, metrics, samples, checkpoints."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from unirl.errors import UserError


class RunDirectory:
    """Writes and, on resume, trims the files of a run.

    config.yaml: resolved config. metrics.jsonl: one object a line, one line for each iteration (line 0 holds the
    evaluation before training). samples.jsonl: rollout samples, readable. checkpoints/: see `CheckpointStore`.

    Raises UserError where `path` already holds a run and `resume` is "never", or cannot be written.
    """

    def __init__(self, path: str | Path, *, resume: str):
        self.path = Path(path)
        self.metrics_path = self.path / "metrics.jsonl"
        self.samples_path = self.path / "samples.jsonl"
        self.checkpoints_path = self.path / "checkpoints"
        if resume == "never" and (self.metrics_path.exists() or self.checkpoints_path.exists()):
            raise UserError(
                f"run_dir={self.path} already holds a run: continue it with resume=auto, or choose another run_dir"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run_dir={self.path} cannot be made: {error.strerror}; choose another run_dir") from error

    def write_config(self, yaml: str) -> None:
        """The resolved config, as YAML text."""
        write_aside(self.path / "config.yaml", yaml.encode())

    def write_metrics(self, iteration: int, metrics: dict[str, Any]) -> None:
        """One flushed line; keys keep their order."""
        _append(self.metrics_path, [{"iteration": iteration, **metrics}])

    def write_samples(self, iteration: int, samples: Iterable[dict[str, Any]]) -> None:
        """One line per sample."""
        _append(self.samples_path, [{"iteration": iteration, **sample} for sample in samples])

    def trim(self, *, metrics_after: int, samples_after: int) -> None:
        """Drop the lines of later iterations, and a line that a killed process left half-written."""
        for path, iteration in ((self.metrics_path, metrics_after), (self.samples_path, samples_after)):
            if path.exists():
                kept = [line for line, found in _whole_lines(path) if found["iteration"] <= iteration]
                write_aside(path, b"".join(kept))


def write_aside(path: Path, content: bytes) -> None:
    """Write a file so that a reader or a crash sees the old content or the new, nothing between."""
    aside = path.with_name(f".{path.name}.tmp")
    with open(aside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _append(path: Path, records: list[dict[str, Any]]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _whole_lines(path: Path) -> Iterable[tuple[bytes, dict[str, Any]]]:
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):  # the last line lacks its end where the process died while writing it
                yield line, json.loads(line)
