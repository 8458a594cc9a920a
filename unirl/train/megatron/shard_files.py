"""A trained model's state on disk where several ranks hold it: one file for each, read by the same layout alone."""

import json
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unirl.config.schema import ParallelConfig
from unirl.errors import UserError

LAYOUT = "layout.json"
_SIZES = ("tp", "pp", "cp", "ep", "vpp", "use_distributed_optimizer")


def save_shard(state: dict[str, Any], parallel: ParallelConfig, folder: Path) -> None:
    """Write this rank's part, as `memory.capture_state` gives it, into the existing `folder`; all ranks call it."""
    if dist.get_rank() == 0:
        (folder / LAYOUT).write_text(json.dumps(_layout(parallel)) + "\n")
    torch.save(state, _file(folder))


def load_shard(parallel: ParallelConfig, folder: Path) -> dict[str, Any]:
    """This rank's part. Raises UserError where another layout wrote it, ValueError or OSError where it is damaged."""
    found, here = json.loads((folder / LAYOUT).read_text()), _layout(parallel)
    if found != here:
        differing = ", ".join(f"{name}: there {found.get(name)}, here {here[name]}" for name in here)
        raise UserError(f"{folder} was saved by another layout ({differing}): resume with the layout of the checkpoint")
    try:
        return torch.load(_file(folder), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{_file(folder)}: {error}") from error


def _layout(parallel: ParallelConfig) -> dict[str, Any]:
    sizes = asdict(parallel)
    return {"ranks": dist.get_world_size(), **{name: sizes[name] for name in _SIZES}}


def _file(folder: Path) -> Path:
    return folder / f"rank_{dist.get_rank():05d}.pt"
