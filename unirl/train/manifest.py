"""Sizes and checksums of the files of a checkpoint."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileSum:
    """Size in bytes and SHA-256, as `sha256sum` prints it, of a file."""

    size: int
    sha256: str


def sum_of_file(path: Path) -> FileSum:
    """Reads the whole file: half a second to two for each GB, without the lock of the interpreter."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return FileSum(path.stat().st_size, digest.hexdigest())


def find_damage(folder: Path, files: Mapping[str, FileSum]) -> str | None:
    """What is wrong with the first of the files below `folder` that is not as listed; None where all are."""
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != expected.size:
            return f"{name} has {size} bytes, {expected.size} were written"
        if sum_of_file(path).sha256 != expected.sha256:
            return f"{name} is not what was written: its checksum differs"
    return None
