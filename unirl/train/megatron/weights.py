"""Hugging Face folders in and out of a policy, one tensor at a time."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from unirl.errors import UserError
from unirl.train.megatron.model import PackedModel
from unirl.train.megatron.names import WeightMap, weight_maps

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
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


def load_weights(model: PackedModel, folder: Path) -> None:
    """Fill every weight of `model` from the safetensors of `folder`.

    Raises UserError where there are no safetensors, a file cannot be read, a name is missing, a name has no place in
    the model, or a shape is another one.
    """
    try:
        _fill(model, folder)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{folder}: the weights cannot be read: {error}; fetch or export the model again") from error


def _fill(model: PackedModel, folder: Path) -> None:
    parameters = dict(model.named_parameters())
    maps = weight_maps(model.architecture, model.vocab_size)
    files = _tensor_files(folder)
    _check_names(folder, set(files), maps, tied=model.architecture.tied)
    with ExitStack() as stack, torch.no_grad():
        opened = {file: stack.enter_context(safe_open(folder / file, "pt")) for file in sorted(set(files.values()))}
        for weight in maps:
            source = weight.layout.join([opened[files[name]].get_tensor(name) for name in weight.hf_names])
            target = parameters[weight.name]
            if source.shape != target.shape:
                raise UserError(
                    f"{folder}: {' + '.join(weight.hf_names)} give a weight of shape {tuple(source.shape)}, "
                    f"config.json implies {tuple(target.shape)}"
                )
            target.copy_(source)


def iterate_weights(model: PackedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, copy of the full tensor) of every weight, in a fixed order; no duplicate of a tied head."""
    return _by_hf_name(model, {name: parameter.detach() for name, parameter in model.named_parameters()})


def iterate_gradients(model: PackedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The same for the gradients, float32, of a model that Megatron's DistributedDataParallel wraps."""
    return _by_hf_name(model, {name: parameter.main_grad for name, parameter in model.named_parameters()})


def _by_hf_name(model: PackedModel, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for weight in weight_maps(model.architecture, model.vocab_size):
        parts = weight.layout.split(tensors[weight.name])
        yield from zip(weight.hf_names, (part.clone() for part in parts), strict=True)


def write_hf_folder(weights: Iterable[tuple[str, torch.Tensor]], source: Path, folder: Path) -> None:
    """Write `weights` and the other files of the `source` folder (config, tokenizer) to the new folder `folder`.

    Everything is written to a folder beside it, which is then renamed. The config names the dtype of the weights.
    Raises FileExistsError where `folder` exists.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists: give a new folder, or remove it")
    aside = folder.with_name(folder.name + ".part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix not in _WEIGHT_SUFFIXES and not file.name.endswith(".index.json"):
            shutil.copyfile(file, aside / file.name)
    dtype = _write_safetensors(weights, aside)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    os.rename(aside, folder)


def _tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    if (folder / INDEX).exists():
        return json.loads((folder / INDEX).read_text())["weight_map"]
    if (folder / SINGLE).exists():
        with safe_open(folder / SINGLE, "pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}: convert the model to safetensors")


def _check_names(folder: Path, found: set[str], maps: list[WeightMap], *, tied: bool) -> None:
    expected = {name for weight in maps for name in weight.hf_names}
    # A tied head may be stored a second time, and old checkpoints store RoPE's constants.
    found = {name for name in found if not name.endswith("rotary_emb.inv_freq")}
    if tied:
        found.discard("lm_head.weight")
    if found != expected:
        missing, unknown = sorted(expected - found), sorted(found - expected)
        raise UserError(
            f"{folder}: the weights do not match config.json; missing: {missing[:5] or 'none'} ({len(missing)}), "
            f"without a place: {unknown[:5] or 'none'} ({len(unknown)})"
        )


def _write_safetensors(weights: Iterable[tuple[str, torch.Tensor]], folder: Path) -> torch.dtype:
    """One file, or shards and their index; returns the dtype of the weights."""
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    size = total = 0

    def flush() -> None:
        save_file(shard, folder / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in weights:
        if shard and size + tensor.nbytes > MAX_SHARD_BYTES:
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
