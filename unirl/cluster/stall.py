"""What is written down when workers are lost or hang: who, where, and what every process was doing."""

from datetime import datetime
from pathlib import Path

from unirl.cluster.crew import Crew, RankFailed, WorkersLost

_TAIL_BYTES = 2_000


def write_stall_report(folder: Path, lost: WorkersLost | RankFailed, crew: Crew) -> Path:
    """A text file in `folder`: what was lost, the seat and the stacks of each worker, the last metrics."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"stall-{datetime.now():%Y%m%d-%H%M%S-%f}.txt"
    stacks = crew.stacks(lost.reasons)
    workers = [f"== rank {rank}: {seat}\n{stacks[rank]}" for rank, seat in enumerate(crew.seats)]
    path.write_text("\n".join([f"{lost}\n", *workers, "== last metrics", _last_line(folder / "metrics.jsonl"), ""]))
    return path


def _last_line(path: Path) -> str:
    """The end of the file's last line; "none" where there is no file."""
    if not path.exists():
        return "none"
    lines = path.read_bytes().splitlines()
    return lines[-1][-_TAIL_BYTES:].decode(errors="replace") if lines else "none"
