"""Kernels, forward and backward, against torch on this CPU, all in one run.

    python -m benchmarks.kernels --rows 512 --vocab 151936 --output benchmarks/results/kernels_cpu.json

The ratio is of CPU time (all threads), which other work on the machine disturbs least.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernels.candidates import HIDDEN, KERNELS, Batch, candidates
from benchmarks.kernels.measure import Measurement, measure
from unirl.kernels import cpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    options = _options()
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = [
        row
        for kernel in options.kernels
        for tokens in options.rows
        for dtype in options.dtypes
        for entropy in (False, True)
        for row in _case(options, kernel, tokens, dtype, entropy)
    ]
    _print(options, rows)
    if options.output:
        report = {"environment": _environment(), "vocab": options.vocab, "results": rows}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), help="default: all")
    parser.add_argument("--rows", type=int, nargs="+", default=[512], help="tokens T (default 512)")
    parser.add_argument("--vocab", type=int, default=151_936, help="vocabulary V (default 151936, Qwen3)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="of the logits")
    parser.add_argument("--repeats", type=int, default=7, help="measured runs of each candidate (default 7)")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--candidates", nargs="+", help="default: all; eager needs memory for five times the logits")
    parser.add_argument("--compile", action="store_true", help="also torch.compile of the eager code")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    return parser.parse_args()


def _case(options: argparse.Namespace, kernel: str, tokens: int, dtype: str, with_entropy: bool) -> list[dict]:
    """A row for each candidate; memory is compared with logits [tokens, vocab] of this dtype."""
    with_head = kernel == "linear_token_logprob"
    batch = Batch.random(tokens, options.vocab, DTYPES[dtype], with_head)
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(tokens, HIDDEN if with_head else options.vocab, generator=generator)
    source = source.mul_(0.4 if with_head else 3).to(DTYPES[dtype])
    ways = candidates(kernel, options.compile)
    chosen = [name for name in ways if options.candidates is None or name in options.candidates]
    found = {name: measure(ways[name], source, batch, with_entropy, options.repeats) for name in chosen}
    case = {"kernel": kernel, "rows": tokens, "dtype": dtype, "with_entropy": with_entropy}
    logits_mib = tokens * options.vocab * DTYPES[dtype].itemsize / 2**20
    return [case | _row(name, found[name], found.get("eager"), logits_mib) for name in chosen]


def _row(name: str, found: Measurement, eager: Measurement | None, logits_mib: float) -> dict:
    return {
        "candidate": name,
        **{key: round(value, 1) for key, value in asdict(found).items()},
        "extra_percent_of_logits": round(100 * found.extra_mib / logits_mib, 2),
        "cpu_time_ratio": None if eager is None else round(eager.cpu_ms / found.cpu_ms, 2),
    }


def _environment() -> dict:
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "isa": cpu.isa()}


def _print(options: argparse.Namespace, rows: list[dict]) -> None:
    where = ", ".join(f"{key} {value}" for key, value in _environment().items())
    table = Table(title=f"forward + backward, V = {options.vocab} ({where})")
    for name in ("kernel", "T", "dtype", "entropy", "candidate"):
        table.add_column(name)
    for name in ("wall ms", "CPU ms", "extra MiB", "% of logits", "CPU time: eager / this"):
        table.add_column(name, justify="right")
    for row in rows:
        shown = row | {"with_entropy": "yes" if row["with_entropy"] else "no"}
        table.add_row(*("-" if value is None else str(value) for value in shown.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
