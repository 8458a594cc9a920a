"""Checkpoints on disk: written aside and renamed, so that the newest one found is always whole."""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from unirl.errors import UserError


class DamagedCheckpointError(UserError):
    """A checkpoint of which a file is missing, cut off or not what was written."""


_NAME = re.compile(r"iteration_(\d{8})")


class CheckpointStore:
    """Folders `iteration_00000010` below `path`, the newest `keep` of them kept.

    A folder holds `state.json` (counters and sampler state, plain JSON) and a folder for each model: `actor`, and
    `critic` where there is one.
    """

    def __init__(self, path: Path, *, keep: int):
        self.path = path
        self.keep = keep

    def iterations(self) -> list[int]:
        """Iterations that have a whole checkpoint, ascending."""
        if not self.path.is_dir():
            return []
        return sorted(int(found[1]) for entry in self.path.iterdir() if (found := _NAME.fullmatch(entry.name)))

    def save(self, iteration: int, state: dict[str, Any], writers: Mapping[str, Callable[[Path], None]]) -> Path:
        """Write a whole checkpoint or none, then delete those beyond `keep`; `writers` fill the folder of each model.

        Raises UserError on a full disk.
        """
        target = self.folder(iteration)
        aside = self.path / f".tmp-{target.name}"
        try:
            self._clean()
            for name, write in writers.items():
                (aside / name).mkdir(parents=True)
                write(aside / name)
            (aside / "state.json").write_text(json.dumps(state, indent=1))
            _sync_to_disk(aside)
            if target.exists():
                target.rename(self.path / f".tmp-old-{target.name}")  # whole until the new one stands in its place
            aside.rename(target)
            self._clean()
        except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
            shutil.rmtree(aside, ignore_errors=True)
            raise UserError(
                f"checkpoint of iteration {iteration} could not be written to {self.path}: {_reason(error)}; "
                "make room, or point run_dir elsewhere; earlier checkpoints are whole, continue with resume=auto"
            ) from error
        for old in self.iterations()[: -self.keep]:
            shutil.rmtree(self.folder(old))
        return target

    def load_newest(
        self, readers: Mapping[str, Callable[[Path], None]], say: Callable[[str], None]
    ) -> dict[str, Any] | None:
        """`load` the newest checkpoint, or, where it is damaged, the newest whole one; None where there is none at all.

        Damaged ones are renamed, so that no later run takes them for checkpoints, and named through `say`.
        Raises UserError where there are checkpoints and none is whole.
        """
        damaged: dict[int, DamagedCheckpointError] = {}
        for iteration in reversed(self.iterations()):
            try:
                state = self.load(iteration, readers)
            except DamagedCheckpointError as error:
                damaged[iteration] = error
                continue
            for other, error in damaged.items():
                self._set_aside(other)
                say(f"{error}; going back to the checkpoint of iteration {iteration}")
            return state
        if damaged:
            raise UserError("\n".join([*map(str, damaged.values()), "no checkpoint is whole: start another run_dir"]))
        return None

    def load(self, iteration: int, readers: Mapping[str, Callable[[Path], None]]) -> dict[str, Any]:
        """Give each model's folder of that iteration to its reader and return the state that was saved with them.

        Raises UserError where the checkpoint holds other models, DamagedCheckpointError where it cannot be read.
        """
        folder = self.folder(iteration)
        try:
            state = json.loads((folder / "state.json").read_text())
            self._check_models(folder, readers)
            for name, read in readers.items():
                read(folder / name)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise DamagedCheckpointError(f"checkpoint {folder} is damaged: {_reason(error)}") from error
        return state

    def _check_models(self, folder: Path, readers: Mapping[str, Callable[[Path], None]]) -> None:
        found = {entry.name for entry in folder.iterdir() if entry.is_dir()}
        if not found:
            raise DamagedCheckpointError(f"checkpoint {folder} is damaged: it holds no model")
        if found != readers.keys():
            raise UserError(
                f"{folder} holds {', '.join(sorted(found))}, this run trains {', '.join(sorted(readers))}: resume with "
                "or without a critic (algorithm.critic) as it was, or start another run_dir"
            )

    def _set_aside(self, iteration: int) -> None:
        folder = self.folder(iteration)
        aside = folder.with_name(f"damaged_{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)  # of the same iteration, damaged before
        folder.rename(aside)

    def folder(self, iteration: int) -> Path:
        """Where the checkpoint of that iteration is, or would be."""
        return self.path / f"iteration_{iteration:08d}"

    def _clean(self) -> None:
        """Remove what a save that was killed left behind."""
        self.path.mkdir(parents=True, exist_ok=True)
        for leftover in self.path.glob(".tmp-*"):
            shutil.rmtree(leftover)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def _sync_to_disk(folder: Path) -> None:
    """A rename may reach the disk before the data it names: flush every file and folder first."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
