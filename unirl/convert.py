"""`python -m unirl.convert SOURCE OUT`: a checkpoint, or a Hugging Face folder in another dtype, as a new Hugging Face
folder. Needs no GPU and one process, whatever the run had; holds one file's tensors in memory.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError

from unirl.errors import UserError
from unirl.train.checkpoint import CheckpointStore
from unirl.train.megatron.architecture import read_architecture
from unirl.train.megatron.hf_folder import MAX_SHARD_BYTES, HfTensors, resolve_folder, write_hf_folder
from unirl.train.megatron.names import WeightMap, weight_maps
from unirl.train.megatron.state import read_weights

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
        convert(options.source, options.out, model=options.model, dtype=dtype, max_shard_bytes=options.max_shard_bytes)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def convert(
    source: Path,
    out: Path,
    *,
    model: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the new Hugging Face folder `out`.

    source: a Hugging Face folder, a checkpoint (`RUN_DIR/checkpoints/iteration_00000010`) or a run directory, of which
        the newest checkpoint is taken.
    model: for a checkpoint, the folder or hub name that gives config and tokenizer; default: what the run was started
        with.
    dtype: of the weights written; None keeps theirs.
    max_shard_bytes: size of a file from which on another one is begun.

    Raises UserError where `out` exists, `source` is none of the three, or its weights are not those of the model.
    """
    if out.exists():
        raise UserError(f"{out} exists: give a new folder, or remove it")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if (source / "config.json").is_file():
        folder = source
        weights = _hf_weights(folder)
    else:
        checkpoint = _find_checkpoint(source)
        folder = resolve_folder(model or _model_of_run(checkpoint))
        console.print(f"Weights of {checkpoint}, config and tokenizer of {folder}")
        weights = _checkpoint_weights(checkpoint, folder)
    count = sum(len(weight.hf_names) for weight in _maps(folder))
    weights = track(weights, "Writing", total=count, console=console, disable=not console.is_terminal)
    try:
        write_hf_folder(_in_dtype(weights, dtype), folder, out, max_shard_bytes=max_shard_bytes)
    except (OSError, SafetensorError) as error:
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


def _hf_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with HfTensors(folder) as tensors:
        maps = _maps(folder)
        tensors.check_names(maps)
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
        description="Write a checkpoint, or a Hugging Face folder in another dtype, as a new Hugging Face folder.",
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="Hugging Face folder, checkpoint (RUN_DIR/checkpoints/iteration_00000010), or run directory: its newest",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="new folder; one that exists is refused")
    parser.add_argument(
        "--model", help="for a checkpoint: folder or hub name of its model, if not the run's model.path"
    )
    parser.add_argument(
        "--dtype", choices=["keep", *DTYPES], default="keep", help="of the weights (default: as they are)"
    )
    parser.add_argument(
        "--max-shard-gb",
        dest="max_shard_bytes",
        type=_gigabytes,
        metavar="GB",
        default=MAX_SHARD_BYTES,
        help="largest size of a file, in units of 2^30 bytes (default: 5)",
    )
    return parser


def _gigabytes(text: str) -> int:
    size = float(text)
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(size * 2**30)


if __name__ == "__main__":
    sys.exit(main())
