"""`python -m unirl.convert SOURCE OUT`: a checkpoint as a new Hugging Face folder, a Hugging Face folder as a new
checkpoint, or in another dtype. Needs no GPU and one process, whatever the run has; holds the tensors of one file that
it writes in memory.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Literal

import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import Progress, track
from safetensors import SafetensorError

from unirl.errors import UserError
from unirl.train.checkpoint import CheckpointStore, CheckpointWriteError
from unirl.train.manifest import find_damage, read_manifest, write_manifest
from unirl.train.megatron.architecture import read_architecture
from unirl.train.megatron.hf_folder import MAX_SHARD_BYTES, HfTensors, resolve_folder, write_hf_folder
from unirl.train.megatron.names import WeightMap, hf_shapes, weight_maps
from unirl.train.megatron.state import read_weights, write_weights
from unirl.train.new_folder import new_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EXIT_USER_ERROR = 2
_ACTOR = "actor"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own). Returns the exit code: 0, or 2 on an error that is the user's
    to mend.
    """
    options = _parser().parse_args(arguments)
    dtype = DTYPES.get(options.dtype)
    try:
        convert(
            options.source,
            options.out,
            to=options.to,
            model=options.model,
            dtype=dtype,
            max_shard_bytes=options.max_shard_bytes,
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def convert(
    source: Path,
    out: Path,
    *,
    to: Literal["hf", "checkpoint"] = "hf",
    model: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the new folder `out`: a Hugging Face folder, or a checkpoint with the weights of one.

    source: a Hugging Face folder; for `to="hf"` also a checkpoint (`RUN_DIR/checkpoints/iteration_00000010`) or a run
        directory, of which the newest checkpoint is taken.
    model: for a checkpoint, the folder or hub name that gives config and tokenizer; default: what the run was started
        with.
    dtype: of the weights written; None keeps theirs. A checkpoint has float32 in any case: it is what they become again
        as a Hugging Face folder.
    max_shard_bytes: size of a file from which on another one is begun.

    Raises UserError where `out` exists or cannot be written, `source` is none of these or damaged, or its weights are
    not those of the model.
    """
    if out.exists():
        raise UserError(f"{out} exists: give a new folder, or remove it")
    is_folder = (source / "config.json").is_file()
    if model is not None and is_folder:
        raise UserError(f"--model {model}: {source} is a Hugging Face folder and has its own config; leave it out")
    if to == "checkpoint" and not is_folder:
        raise UserError(f"{source}: a checkpoint is made of a Hugging Face folder, and this has no config.json")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        if to == "checkpoint":
            count = _write_checkpoint(source, out, dtype, max_shard_bytes, console)
        else:
            count = _write_hf(source, out, model, dtype, max_shard_bytes, console)
    except (OSError, SafetensorError, CheckpointWriteError) as error:
        raise UserError(f"{out} cannot be written: {error}") from error
    console.print(f"Written: {count} tensors to {out}")


def read_checkpoint_weights(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(Megatron name in a model of one rank, full tensor in the dtype of training) of every weight of the policy in a
    checkpoint, whatever its layout was.
    """
    folder = checkpoint / _ACTOR
    try:
        yield from read_weights(folder)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder} cannot be read: {error}; take another checkpoint") from error


def _write_hf(
    source: Path, out: Path, model: str | None, dtype: torch.dtype | None, max_shard_bytes: int, console: Console
) -> int:
    """Returns the number of tensors."""
    if (source / "config.json").is_file():
        folder = source
        weights = _hf_weights(folder)
    else:
        checkpoint = _find_checkpoint(source)
        folder = resolve_folder(model or _model_of_run(checkpoint))
        console.print(f"Weights of {checkpoint}, config and tokenizer of {folder}")
        _check_files(checkpoint, console)
        weights = _checkpoint_weights(checkpoint, folder)
    count = sum(len(weight.hf_names) for weight in _maps(folder))
    weights = track(weights, "Writing", total=count, console=console, disable=not console.is_terminal)
    write_hf_folder(_in_dtype(weights, dtype), folder, out, max_shard_bytes=max_shard_bytes)
    return count


def _write_checkpoint(
    folder: Path, out: Path, dtype: torch.dtype | None, max_shard_bytes: int, console: Console
) -> int:
    """Returns the number of tensors."""
    maps = {weight.name: weight for weight in _maps(folder)}
    hf_shapes_of = hf_shapes(read_architecture(folder))
    shapes = {name: _shape(weight, hf_shapes_of) for name, weight in maps.items()}
    with new_folder(out) as aside, Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("Writing", total=len(maps))
        (aside / _ACTOR).mkdir()
        with HfTensors(folder) as tensors:
            tensors.check_names(maps.values())
            tensors.check_shapes(hf_shapes_of)

            def read(name: str) -> torch.Tensor:
                progress.advance(task)
                tensor = maps[name].read([tensors[hf_name] for hf_name in maps[name].hf_names], 0, 1)
                return tensor if dtype is None else tensor.to(dtype)

            kept = _common_dtype(folder, {tensors[name].dtype for name in hf_shapes_of})
            files = write_weights(shapes, read, dtype or kept, aside / _ACTOR, max_file_bytes=max_shard_bytes)
        write_manifest(aside, {f"{_ACTOR}/{name}": found for name, found in files.items()})
    return len(maps)


def _shape(weight: WeightMap, hf_shapes_of: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Of the Megatron weight: found without any data."""
    sources = [torch.empty(hf_shapes_of[name], device="meta") for name in weight.hf_names]
    return tuple(weight.read(sources, 0, 1).shape)


def _common_dtype(folder: Path, dtypes: set[torch.dtype]) -> torch.dtype:
    """One in which every weight keeps its value."""
    unknown = dtypes - set(DTYPES.values())
    if unknown:
        raise UserError(f"{folder} has weights in {min(map(str, unknown))}, expected {', '.join(DTYPES)}")
    return reduce(torch.promote_types, dtypes)


def _check_files(checkpoint: Path, console: Console) -> None:
    """Raises UserError unless the model of the checkpoint is what was written."""
    try:
        files = {name: found for name, found in read_manifest(checkpoint).items() if name.startswith(f"{_ACTOR}/")}
        with console.status("Comparing with the manifest"):
            damage = find_damage(checkpoint, files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        damage = f"its manifest cannot be read: {error}"
    if damage:
        raise UserError(f"{checkpoint} is damaged: {damage}; take another checkpoint")


def _hf_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with HfTensors(folder) as tensors:
        maps = _maps(folder)
        tensors.check_names(maps)
        tensors.check_shapes(hf_shapes(read_architecture(folder)))
        for weight in maps:
            yield from ((name, tensors[name][:]) for name in weight.hf_names)


def _checkpoint_weights(checkpoint: Path, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    expected = {weight.name: weight for weight in _maps(folder)}
    for name, tensor in read_checkpoint_weights(checkpoint):
        if name not in expected:
            raise UserError(f"{checkpoint} has a weight {name}, the model {folder} has none: give its model (--model)")
        yield from expected.pop(name).merge([tensor])
    if expected:
        raise UserError(f"{checkpoint} lacks {min(expected)} of the model {folder}: give its model (--model)")


def _maps(folder: Path) -> list[WeightMap]:
    architecture = read_architecture(folder)
    return [weight for weight in weight_maps(architecture, architecture.vocab_size) if weight.exported]


def _in_dtype(
    weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        yield name, tensor if dtype is None else tensor.to(dtype)


def _find_checkpoint(source: Path) -> Path:
    if (source / _ACTOR).is_dir():
        return source
    store = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    iterations = CheckpointStore(store, keep=1).iterations()
    if not iterations:
        raise UserError(
            f"{source}: expected a Hugging Face folder (with config.json), a checkpoint "
            "(RUN_DIR/checkpoints/iteration_00000010) or a run directory with checkpoints"
        )
    return CheckpointStore(store, keep=1).folder(iterations[-1])


def _model_of_run(checkpoint: Path) -> str:
    config = checkpoint.resolve().parents[1] / "config.yaml"
    if not config.is_file():
        raise UserError(f"{checkpoint} lies in no run directory (no {config}): say with --model which model it is of")
    return OmegaConf.load(config).model.path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m unirl.convert",
        description="Make a Hugging Face folder of a checkpoint, a checkpoint of a Hugging Face folder (--to "
        "checkpoint), or a Hugging Face folder in another dtype. Needs no GPU and one process.",
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="Hugging Face folder, checkpoint (RUN_DIR/checkpoints/iteration_00000010), or run directory: its newest",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="new folder; one that exists is refused")
    parser.add_argument(
        "--to",
        choices=["hf", "checkpoint"],
        default="hf",
        help="what OUT becomes: a Hugging Face folder (default), or a checkpoint with the weights of one",
    )
    parser.add_argument(
        "--model", help="for a checkpoint: folder or hub name of its model, if not the run's model.path"
    )
    parser.add_argument(
        "--dtype",
        choices=["keep", *DTYPES],
        default="keep",
        help="of the weights (default: as they are)",
    )
    parser.add_argument(
        "--max-shard-gb",
        dest="max_shard_bytes",
        type=_gigabytes,
        metavar="GB",
        default=MAX_SHARD_BYTES,
        help="largest size of a file, in units of 2^30 bytes (default: 5); so much is held in memory",
    )
    return parser


def _gigabytes(text: str) -> int:
    size = float(text)
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(size * 2**30)


if __name__ == "__main__":
    sys.exit(main())
