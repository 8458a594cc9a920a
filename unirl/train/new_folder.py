"""Folders that appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder`, which gets that name when the block has ended and everything is on the disk; an
    error in the block removes it.

    Raises FileExistsError where `folder` exists.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists: give a new folder, or remove it")
    aside = folder.with_name(folder.name + ".part")
    shutil.rmtree(aside, ignore_errors=True)
    with ExitStack() as on_error:
        on_error.callback(shutil.rmtree, aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        sync_to_disk(aside)
        os.rename(aside, folder)
        on_error.pop_all()


def sync_to_disk(folder: Path) -> None:
    """A rename may reach the disk before the data it names: flush every file and folder first."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
