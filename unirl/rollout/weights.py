"""Weights by their Hugging Face names: where they come from, and whether they are those of a model."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import safe_open

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_NAMES_SHOWN = 20


@runtime_checkable
class WeightSource(Protocol):
    """The weights of a model, wherever its ranks are: (Hugging Face name, full tensor) each.

    They may be gone through again as long as the model stays as it is. num_stages: parts of the model that are held by
    different processes.
    """

    num_stages: int

    def shapes(self) -> Iterable[tuple[str, tuple[int, ...]]]:
        """Name and shape of each, of all stages; no weight is moved for it, where that can be avoided."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them, brought to this process."""

    def feed(self, consume: Callable[[Iterator[tuple[str, torch.Tensor]]], Any], stage: int) -> Any:
        """What `consume` makes of the weights of a stage, called in the process that holds them. Each tensor is given
        as it is gathered; `consume` is pickled, and so is its result.
        """


class LocalWeights:
    """Weights in this process, which `export` gives anew each time; a `WeightSource` of one stage."""

    num_stages = 1

    def __init__(self, export: Callable[[], Iterable[tuple[str, torch.Tensor]]]):
        self._export = export

    @staticmethod
    def holding(weights: Iterable[tuple[str, torch.Tensor]]) -> "LocalWeights":
        """All of `weights`, which are held."""
        held = list(weights)
        return LocalWeights(lambda: held)

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """See `WeightSource.shapes`: exported for it."""
        return ((name, tuple(tensor.shape)) for name, tensor in self._export())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor.detach()) for name, tensor in self._export())

    def feed(self, consume: Callable[[Iterator[tuple[str, torch.Tensor]]], Any], stage: int) -> Any:
        """See `WeightSource.feed`."""
        return consume(iter(self))


def read_weights(
    folder: str | Path, *, tied: bool, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """All tensors of `model.safetensors`, or of the files that `model.safetensors.index.json` names.

    A tied model may store its embedding a second time as `lm_head.weight`: equal copies are dropped. Raises
    FileNotFoundError where there are no such files, ValueError on a different copy.
    """
    weights = {}
    for path in _weight_files(Path(folder)):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                # A copy, so that nothing maps a file that may be replaced while the engine lives.
                weights[name] = file.get_tensor(name).to(device, dtype, copy=True)
    if tied and _HEAD in weights and _EMBEDDING in weights and not torch.equal(weights.pop(_HEAD), weights[_EMBEDDING]):
        raise ValueError(f"{folder}: tie_word_embeddings is true, but {_HEAD} differs from {_EMBEDDING}")
    return weights


def weight_shapes(folder: str | Path, *, tied: bool) -> dict[str, torch.Tensor]:
    """What `read_weights` would give, without the values: tensors on the device "meta"."""
    weights = {}
    for path in _weight_files(Path(folder)):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                weights[name] = torch.empty(file.get_slice(name).get_shape(), device="meta")
    if tied:
        weights.pop(_HEAD, None)
    return weights


def checked_weights(
    weights: Iterable[tuple[str, torch.Tensor]], expected: Mapping[str, torch.Tensor], source: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights` as they come. At their end raises ValueError, with all differences, unless names and shapes are those
    of `expected`, and at once where a name comes twice.
    """
    found = {}
    for name, tensor in weights:
        if name in found:
            raise ValueError(f"weights: {name} was given twice")
        found[name] = torch.empty_like(tensor, device="meta")
        yield name, tensor
    check_weights(found, expected, source)


def _weight_files(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if single.exists():
        return [single]
    raise FileNotFoundError(f"{folder}: found neither {single.name} nor {index.name}; save the model as safetensors")


def collect_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """`weights` by name. Raises ValueError where a name comes twice."""
    by_name = {}
    for name, tensor in weights:
        if name in by_name:
            raise ValueError(f"weights: {name} was given twice")
        by_name[name] = tensor
    return by_name


def check_weights(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], source: str) -> None:
    """Raise ValueError, with all differences, unless both have the same names and shapes."""
    differences = {
        "missing": sorted(expected.keys() - found.keys()),
        "not in the model": sorted(found.keys() - expected.keys()),
        "wrong shape": [
            f"{name} {tuple(found[name].shape)} instead of {tuple(expected[name].shape)}"
            for name in sorted(expected.keys() & found.keys())
            if found[name].shape != expected[name].shape
        ],
    }
    lines = [f"  {kind} ({len(names)}): {_shown(names)}" for kind, names in differences.items() if names]
    if lines:
        raise ValueError("\n".join([f"{source}: the weights do not match the model; none was changed", *lines]))


def _shown(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
