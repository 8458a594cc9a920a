"""token_logprob, forward and backward, against torch on this CPU, all in one run.

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

from benchmarks.kernels.candidates import candidates
from benchmarks.kernels.measure import Measurement, measure
from unirl.kernels import cpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    options = _options()
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = [row for dtype in options.dtypes for entropy in (False, True) for row in _case(options, dtype, entropy)]
    _print(options, rows)
    if options.output:
        report = {"environment": _environment(), "rows": options.rows, "vocab": options.vocab, "results": rows}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512, help="tokens T (default 512)")
    parser.add_argument("--vocab", type=int, default=151_936, help="vocabulary V (default 151936, Qwen3)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="of the logits")
    parser.add_argument("--repeats", type=int, default=7, help="measured runs of each candidate (default 7)")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--compile", action="store_true", help="also torch.compile of the eager code")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    return parser.parse_args()


def _case(options: argparse.Namespace, dtype: str, with_entropy: bool) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(options.rows, options.vocab, generator=generator).mul_(3).to(DTYPES[dtype])
    targets = torch.randint(options.vocab, (options.rows,), generator=generator)
    found = {
        name: measure(candidate, source, targets, with_entropy, options.repeats)
        for name, candidate in candidates(options.compile).items()
    }
    logits_mib = source.numel() * source.element_size() / 2**20
    return [_row(dtype, with_entropy, name, found[name], found["eager"], logits_mib) for name in found]


def _row(dtype: str, with_entropy: bool, name: str, found: Measurement, eager: Measurement, logits_mib: float) -> dict:
    rounded = {key: round(value, 1) for key, value in asdict(found).items()}
    return {
        "dtype": dtype,
        "with_entropy": with_entropy,
        "candidate": name,
        **rounded,
        "extra_percent_of_logits": round(100 * found.extra_mib / logits_mib, 2),
        "cpu_time_ratio": round(eager.cpu_ms / found.cpu_ms, 2),
    }


def _environment() -> dict:
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "isa": cpu.isa()}


def _print(options: argparse.Namespace, rows: list[dict]) -> None:
    where = ", ".join(f"{key} {value}" for key, value in _environment().items())
    table = Table(title=f"forward + backward, T = {options.rows}, V = {options.vocab} ({where})")
    for name in ("dtype", "entropy", "candidate"):
        table.add_column(name)
    for name in ("wall ms", "CPU ms", "extra MiB", "% of logits", "CPU time: eager / this"):
        table.add_column(name, justify="right")
    for row in rows:
        dtype, with_entropy, *rest = row.values()
        table.add_row(dtype, "yes" if with_entropy else "no", *(str(value) for value in rest))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
