"""Reads what a run left behind: metrics.jsonl and samples.jsonl of its run_dir."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunRecord:
    """`metrics`: one dict per iteration (number 0 is before training). `samples`: rollout and evaluation samples."""

    metrics: list[dict[str, Any]]
    samples: list[dict[str, Any]]

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """The lines of `metrics` that hold an evaluation."""
        return [line for line in self.metrics if any(name.startswith("eval/") for name in line)]

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(iteration, value) of a metric, where it has a value."""
        return [(line["iteration"], line[name]) for line in self.metrics if line.get(name) is not None]

    def improved_sample(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """A held-out problem's sample of the first and of the last evaluation: wrong, then right. None: no such one."""
        if len(self.evaluations) < 2:
            return None
        first, last = (self._evaluation_samples(self.evaluations[end]["iteration"]) for end in (0, -1))
        for number, before in first.items():
            after = last.get(number)
            if after and before["reward"] == 0 and after["reward"] == 1:
                return before, after
        return None

    def _evaluation_samples(self, iteration: int) -> dict[int, dict[str, Any]]:
        return {
            sample["sample_id"]: sample
            for sample in self.samples
            if sample.get("eval") and sample["iteration"] == iteration
        }


def read_run(run_dir: str | Path) -> RunRecord:
    """The record of a run that has ended."""
    return RunRecord(_read(Path(run_dir, "metrics.jsonl")), _read(Path(run_dir, "samples.jsonl")))


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():  # logging.samples_per_iteration=0 writes no samples
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
