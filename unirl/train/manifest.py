"""Sizes and checksums of the files of a checkpoint."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST = "manifest.json"


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


def write_manifest(folder: Path, files: Mapping[str, FileSum]) -> None:
    """Say in `folder` what the files below it are; names are paths from there."""
    manifest = {"files": {name: asdict(found) for name, found in sorted(files.items())}}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def read_manifest(folder: Path) -> dict[str, FileSum]:
    """Raises OSError, ValueError, KeyError or TypeError where there is none, or it is damaged."""
    manifest = json.loads((folder / MANIFEST).read_text())
    return {name: FileSum(**found) for name, found in manifest["files"].items()}


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
