"""What a run shows while it goes: a live display on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_SHOWN = {
    "reward/mean": ("reward", ".3f"),
    "sampling/rounds": ("rounds", ".0f"),
    "sampling/trained_groups": ("groups", ".0f"),
    "filtered_fraction": ("filtered", ".2f"),
    "response/length_mean": ("length", ".1f"),
    "loss": ("loss", ".4f"),
    "grad_norm": ("grad_norm", ".3f"),
    "entropy": ("entropy", ".3f"),
    "tokens_per_second": ("tok/s", ".0f"),
    "time/iteration": ("sec", ".2f"),
}


class RunDisplay:
    """Shows iterations and, on a terminal, the phase that runs now.

    Works as a context manager around the run. Lines go through `message`, so that they do not tear the live display.
    """

    def __init__(self, num_iterations: int, console: Console | None = None):
        self.console = console or Console()
        self.num_iterations = num_iterations
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )

    def __enter__(self) -> "RunDisplay":
        self._progress.start()
        self._run = self._progress.add_task("iterations", total=self.num_iterations)
        return self

    def __exit__(self, *exc_info) -> None:
        self._progress.stop()

    def message(self, text: str) -> None:
        """One line above the display."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, iteration: int, metrics: dict[str, Any]) -> None:
        """The line of one iteration."""
        self._progress.update(self._run, completed=iteration)
        found = {name: value for name, value in metrics.items() if value is not None}
        shown = [f"{label} {found[name]:{form}}" for name, (label, form) in _SHOWN.items() if name in found]
        shown += [f"{name} {value:.3f}" for name, value in found.items() if name.startswith("eval/") and "@" in name]
        self.message(f"[{iteration:>{len(str(self.num_iterations))}}/{self.num_iterations}] " + "  ".join(shown))

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator["Phase"]:
        """A bar for a part of an iteration, gone when it ends."""
        task = self._progress.add_task(f"  {name}", total=total)
        started = time.perf_counter()
        phase = Phase(self._progress, task)
        try:
            yield phase
        finally:
            phase.seconds = time.perf_counter() - started
            self._progress.remove_task(task)


class Phase:
    """A running part of an iteration; `seconds` is set when it has ended."""

    def __init__(self, progress: Progress, task):
        self._progress = progress
        self._task = task
        self.seconds = 0.0

    def update(self, completed: int) -> None:
        """Show that so many units are done."""
        self._progress.update(self._task, completed=completed)
