"""Checkpoints on disk: written aside, renamed when every file is down, so that the newest one found is always whole."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from unirl.errors import UserError
from unirl.train.manifest import FileSum, find_damage, read_manifest, sum_of_file, write_manifest
from unirl.train.new_folder import sync_to_disk


class DamagedCheckpointError(UserError):
    """A checkpoint of which a file is missing, cut off or not what was written."""


class CheckpointWriteError(RuntimeError):
    """A model could not be written; the message says on which rank and why."""


class Checkpointed(Protocol):
    """A model as it is saved and loaded, on all its ranks: a `Trained` model, or the driver's proxy of one."""

    def save(self, folder: Path) -> dict[str, FileSum]: ...

    def begin_save(self, folder: Path) -> None: ...

    def save_done(self) -> bool: ...

    def finish_save(self) -> dict[str, FileSum]: ...

    def check_files(self, folder: Path, files: Mapping[str, FileSum]) -> str | None: ...

    def load(self, folder: Path) -> None: ...


_NAME = re.compile(r"iteration_(\d{8})")
_STATE = "state.json"


@dataclass
class _Saving:
    """A checkpoint on its way; models: those that have not finished."""

    iteration: int
    state: dict[str, Any]
    models: dict[str, Checkpointed]


class CheckpointStore:
    """Folders `iteration_00000010` below `path`, the newest `keep` of them kept.

    A folder holds `state.json` (counters and sampler state, plain JSON), a folder for each model: `actor`, and `critic`
    where there is one, and `manifest.json`: size and checksum of every file.

    A save writes all of it before it returns, or is begun and finished later; one at most is under way.
    """

    def __init__(self, path: Path, *, keep: int):
        self.path = path
        self.keep = keep
        self._saving: _Saving | None = None

    def iterations(self) -> list[int]:
        """Iterations that have a whole checkpoint, ascending."""
        if not self.path.is_dir():
            return []
        return sorted(int(found[1]) for entry in self.path.iterdir() if (found := _NAME.fullmatch(entry.name)))

    def save(self, iteration: int, state: dict[str, Any], models: Mapping[str, Checkpointed]) -> Path:
        """Write a whole checkpoint or none, then delete those beyond `keep`.

        Raises UserError where it could not be written, as on a full disk: nothing of it is left then. RuntimeError
        where the last one is not finished.
        """
        self._check_finished()
        saving = _Saving(iteration, state, dict(models))
        with self._none_or_whole(iteration):
            self._make_folders(iteration, models)
            self._complete(saving, lambda name, model: model.save(self._aside(iteration) / name))
        return self.folder(iteration)

    def begin(self, iteration: int, state: dict[str, Any], models: Mapping[str, Checkpointed]) -> None:
        """Start to write a checkpoint of the models as they are now; `publish` or `finish` it.

        Raises as `save` does.
        """
        self._check_finished()
        # A copy: the caller's state goes on.
        saving = _Saving(iteration, json.loads(json.dumps(state)), {})
        with self._none_or_whole(iteration, saving):
            self._make_folders(iteration, models)
            for name, model in models.items():
                model.begin_save(self._aside(iteration) / name)
                saving.models[name] = model
        self._saving = saving

    def publish(self) -> None:
        """`finish` the save under way if all its files are down; waits for nothing."""
        if self._saving is not None and all(model.save_done() for model in self._saving.models.values()):
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way, if there is one, and give it its name; then delete those beyond `keep`.

        Raises UserError where it could not be written: nothing of it is left then.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            with self._none_or_whole(saving.iteration, saving):
                self._complete(saving, lambda name, model: saving.models.pop(name).finish_save())

    def load_newest(self, models: Mapping[str, Checkpointed], say: Callable[[str], None]) -> dict[str, Any] | None:
        """`load` the newest checkpoint, or, where it is damaged, the newest whole one; None where there is none at all.

        Damaged ones are renamed, so that no later run takes them for checkpoints, and named through `say`.
        Raises UserError where there are checkpoints and none is whole.
        """
        damaged: dict[int, DamagedCheckpointError] = {}
        for iteration in reversed(self.iterations()):
            try:
                state = self.load(iteration, models)
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

    def load(self, iteration: int, models: Mapping[str, Checkpointed]) -> dict[str, Any]:
        """Give each model's folder of that iteration to the model and return the state that was saved with them.

        Every file is compared with the manifest before any model changes. Raises UserError where the checkpoint holds
        other models, DamagedCheckpointError where it is not as it was written.
        """
        folder = self.folder(iteration)
        try:
            files = read_manifest(folder)
            self._check_models(folder, files, models)
            damage = find_damage(folder, {_STATE: files[_STATE]}) or _find_damage(folder, files, models)
            if damage:
                raise DamagedCheckpointError(f"checkpoint {folder} is damaged: {damage}")
            state = json.loads((folder / _STATE).read_text())
            for name, model in models.items():
                model.load(folder / name)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpointError(f"checkpoint {folder} is damaged: {_reason(error)}") from error
        return state

    def folder(self, iteration: int) -> Path:
        """Where the checkpoint of that iteration is, or would be."""
        return self.path / f"iteration_{iteration:08d}"

    def _complete(self, saving: _Saving, finish: Callable[[str, Checkpointed], dict[str, FileSum]]) -> None:
        """Write what the driver has to add, and give the folder its name."""
        aside, target, files = self._aside(saving.iteration), self.folder(saving.iteration), {}
        for name, model in list(saving.models.items()):
            files |= {f"{name}/{file}": found for file, found in finish(name, model).items()}
        (aside / _STATE).write_text(json.dumps(saving.state, indent=1))
        files[_STATE] = sum_of_file(aside / _STATE)
        write_manifest(aside, files)
        sync_to_disk(aside)
        if target.exists():
            target.rename(self.path / f".tmp-old-{target.name}")  # whole until the new one stands in its place
        aside.rename(target)
        self._clean()
        for old in self.iterations()[: -self.keep]:
            shutil.rmtree(self.folder(old))

    @contextmanager
    def _none_or_whole(self, iteration: int, begun: _Saving | None = None) -> Iterator[None]:
        """An error in writing as one that the user can mend, when nothing of the checkpoint is left.

        begun: its models may still write; they come to their end first.
        """
        try:
            yield
        except (OSError, CheckpointWriteError) as error:
            for model in begun.models.values() if begun else ():
                with suppress(CheckpointWriteError):  # one failure is told already
                    model.finish_save()
            shutil.rmtree(self._aside(iteration), ignore_errors=True)
            raise UserError(
                f"checkpoint of iteration {iteration} could not be written to {self.path}: {_reason(error)}; "
                "make room, or point run_dir elsewhere; earlier checkpoints are whole, continue with resume=auto"
            ) from error

    def _check_finished(self) -> None:
        if self._saving is not None:
            raise RuntimeError(f"the checkpoint of iteration {self._saving.iteration} is not finished: finish() first")

    def _make_folders(self, iteration: int, names: Iterable[str]) -> None:
        self._clean()
        for name in names:
            (self._aside(iteration) / name).mkdir(parents=True)

    def _check_models(self, folder: Path, files: Mapping[str, FileSum], models: Mapping[str, Checkpointed]) -> None:
        found = {name.split("/")[0] for name in files if "/" in name}
        if not found:
            raise DamagedCheckpointError(f"checkpoint {folder} is damaged: it holds no model")
        if _STATE not in files:
            raise UserError(
                f"{folder} holds weights, as unirl.convert writes them, and no state of a run: it cannot be resumed; "
                "start from the Hugging Face folder it was made of (model.path)"
            )
        if found != models.keys():
            raise UserError(
                f"{folder} holds {', '.join(sorted(found))}, this run trains {', '.join(sorted(models))}: resume with "
                "or without a critic (algorithm.critic) as it was, or start another run_dir"
            )

    def _set_aside(self, iteration: int) -> None:
        folder = self.folder(iteration)
        aside = folder.with_name(f"damaged_{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)  # of the same iteration, damaged before
        folder.rename(aside)

    def _aside(self, iteration: int) -> Path:
        return self.path / f".tmp-{self.folder(iteration).name}"

    def _clean(self) -> None:
        """Remove what a save that was killed left behind."""
        self.path.mkdir(parents=True, exist_ok=True)
        for leftover in self.path.glob(".tmp-*"):
            shutil.rmtree(leftover)


def _find_damage(folder: Path, files: Mapping[str, FileSum], models: Mapping[str, Checkpointed]) -> str | None:
    for name, model in models.items():
        own = {file.removeprefix(f"{name}/"): found for file, found in files.items() if file.startswith(f"{name}/")}
        damage = model.check_files(folder / name, own)
        if damage:
            return f"{name}/{damage}"
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) if isinstance(error, CheckpointWriteError) else f"{type(error).__name__}: {error}"
