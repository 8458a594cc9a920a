"""Hugging Face folders on disk: found, read a slice at a time, written whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from unirl.errors import UserError
from unirl.train.megatron.names import WeightMap
from unirl.train.new_folder import new_folder

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_HEAD = "lm_head.weight"
MAX_SHARD_BYTES = 5 * 2**30
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


def resolve_folder(path: str) -> Path:
    """The Hugging Face folder at `path`, or of the hub name `path`, downloaded into the hub's cache."""
    if Path(path).is_dir():
        return Path(path)
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UserError(f"model.path: there is no folder {path}")
    try:
        return Path(snapshot_download(path, ignore_patterns=["*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack"]))
    except OSError as error:
        raise UserError(f"{path}: no such folder, and the model hub gives no model of that name: {error}") from error


class StoredTensor:
    """A tensor on disk: `tensor[rows, columns]` reads that slice alone."""

    def __init__(self, file: safe_open, name: str):
        self._slice = file.get_slice(name)
        self.shape = tuple(self._slice.get_shape())

    @property
    def dtype(self) -> torch.dtype:
        return self._slice[:0].dtype

    def __getitem__(self, index) -> torch.Tensor:
        return self._slice[index]


class HfTensors(AbstractContextManager):
    """The tensors of a folder, by name; a file is opened when a tensor of it is asked for.

    Raises UserError where there are no safetensors, or, while it is entered, where a file cannot be read.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._stack = ExitStack()
        self._opened: dict[str, safe_open] = {}
        with self:
            self._files = _tensor_files(folder)

    def check_names(self, maps: Iterable[WeightMap]) -> None:
        """Raises UserError unless the folder holds the tensors of `maps` and nothing else."""
        expected = {name for weight in maps for name in weight.hf_names}
        # Old checkpoints store RoPE's constants, and a tied head may be stored a second time.
        found = {name for name in self._files if not name.endswith("rotary_emb.inv_freq")}
        found -= {_HEAD} - expected
        if found != expected:
            missing, unknown = sorted(expected - found), sorted(found - expected)
            raise UserError(
                f"{self._folder}: the weights do not match config.json; missing: {missing[:5] or 'none'} "
                f"({len(missing)}), without a place: {unknown[:5] or 'none'} ({len(unknown)})"
            )

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises UserError unless the tensors have the `shapes`; opens every file."""
        for name, shape in shapes.items():
            if self[name].shape != shape:
                raise UserError(f"{self._folder}: {name} has the shape {self[name].shape}, config.json implies {shape}")

    def __getitem__(self, name: str) -> StoredTensor:
        file = self._files[name]
        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(safe_open(self._folder / file, "pt"))
        return StoredTensor(self._opened[file], name)

    def __exit__(self, kind, error, traceback) -> None:
        self._opened.clear()
        self._stack.close()
        if isinstance(error, (OSError, SafetensorError, ValueError)):
            raise UserError(
                f"{self._folder}: the weights cannot be read: {error}; fetch or export the model again"
            ) from error


def write_hf_folder(
    weights: Iterable[tuple[str, torch.Tensor]],
    source: Path,
    folder: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `weights` and the other files of the `source` folder (config, tokenizer) to the new folder `folder`.

    One file, or several of at most `max_shard_bytes` (unless one tensor alone is larger) and their index. At most one
    file's tensors are held in memory. Everything is written to a folder beside it, which is then renamed. The config
    names the dtype of the weights. Raises FileExistsError where `folder` exists.
    """
    with new_folder(folder) as aside:
        for file in source.iterdir():
            if file.is_file() and file.suffix not in _WEIGHT_SUFFIXES and not file.name.endswith(".index.json"):
                shutil.copyfile(file, aside / file.name)
        dtype = _write_safetensors(weights, aside, max_shard_bytes)
        config = json.loads((source / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    if (folder / INDEX).exists():
        return json.loads((folder / INDEX).read_text())["weight_map"]
    if (folder / SINGLE).exists():
        with safe_open(folder / SINGLE, "pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}: convert the model to safetensors")


def _write_safetensors(weights: Iterable[tuple[str, torch.Tensor]], folder: Path, max_shard_bytes: int) -> torch.dtype:
    """One file, or shards and their index; returns the dtype of the weights."""
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    size = total = 0

    def flush() -> None:
        save_file(shard, folder / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in weights:
        if shard and size + tensor.nbytes > max_shard_bytes:
            flush()
            size = 0
        shard[name] = tensor.cpu().contiguous()
        size, total, dtype = size + tensor.nbytes, total + tensor.nbytes, tensor.dtype
    flush()
    if len(shards) == 1:
        os.rename(folder / "shard-0.safetensors", folder / SINGLE)
        return dtype
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.rename(folder / f"shard-{number}.safetensors", folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return dtype
