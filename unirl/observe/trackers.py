"""Metric sinks beside metrics.jsonl."""

from pathlib import Path
from typing import Protocol

from unirl.errors import UserError


class Tracker(Protocol):
    """Receives the metrics of each iteration; None stands for a mean over nothing."""

    def log(self, iteration: int, metrics: dict[str, float | None]) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files under `run_dir/tensorboard`."""

    def __init__(self, run_dir: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                'logging.trackers=[tensorboard] needs the package tensorboard: pip install "unirl-megatron[tracking]"'
            ) from error
        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, iteration: int, metrics: dict[str, float | None]) -> None:
        for name, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        self._writer.close()


TRACKERS = {"tensorboard": TensorBoardTracker}


def make_trackers(names: list[str], run_dir: Path) -> list[Tracker]:
    """The trackers of `logging.trackers`, by name."""
    unknown = sorted(set(names) - set(TRACKERS))
    if unknown:
        raise UserError(f"logging.trackers: found {unknown[0]!r}, expected one of {', '.join(TRACKERS)}")
    return [TRACKERS[name](run_dir) for name in names]
