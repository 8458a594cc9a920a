"""Every token kernel on this GPU: time, GB/s, percent of a copy, next to torch eager, torch.compile and Liger-Kernel.

    python -m benchmarks.kernels.gpu --output benchmarks/results/

--dry-run goes through it on the CPU, at sizes for Triton's interpreter (TRITON_INTERPRET=1); its times mean nothing.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernels.gpu.cases import FLOOR_PASSES, Case, cases
from benchmarks.kernels.gpu.timing import copy_bandwidth, median_of
from unirl.kernels import available_backends

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NO_GPU = "no CUDA device: this times kernels on a GPU. On a CPU: `python -m benchmarks.kernels`, or --dry-run"
MIB = 2.0**20


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 2 where there is no GPU."""
    options = _options(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print(f"error: {NO_GPU}", file=sys.stderr)
        return 2
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backends = [name for name in available_backends() if name in ("triton", "cuda")]
    with torch.device(device):
        bandwidth = copy_bandwidth(1 << 20 if options.dry_run else 1 << 31)
        rows = list(_rows(options, backends, bandwidth))
    report = {"environment": _environment(device, backends), "copy_gb_per_s": round(bandwidth, 1), "results": rows}
    _print(report)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        name = report["environment"]["device"].lower().replace(" ", "_")
        file = options.output / f"kernels_gpu_{name}.json"
        file.write_text(json.dumps(report, indent=2) + "\n")
        print(f"written: {file}")
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 8192, 32_768], help="tokens T")
    parser.add_argument(
        "--vocab", type=int, nargs="+", default=[151_936, 75_968, 37_984], help="Qwen3's, and TP 2, TP 4"
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16"], help="of the logits")
    parser.add_argument("--repeats", type=int, default=20, help="measured runs, at most 1.5 s of them (default 20)")
    parser.add_argument("--seconds", type=float, default=300.0, help="then what is left of the list is left out")
    parser.add_argument("--output", type=Path, help="folder for the results as JSON")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at small sizes")
    options = parser.parse_args(arguments)
    if options.dry_run:
        options.rows, options.vocab, options.repeats = [3], [700], 1
    return options


def _rows(options: argparse.Namespace, backends: list[str], bandwidth: float) -> Iterator[dict]:
    """Of each size ours before the rivals, and the sizes of the targets first."""
    deadline = time.monotonic() + options.seconds
    sizes = [(t, v, d) for d in options.dtypes for v in options.vocab for t in sorted(options.rows, key=_from_middle)]
    for tokens, vocab, dtype in sizes:
        for with_entropy in (False, True):
            for case in cases(tokens, vocab, DTYPES[dtype], with_entropy, backends, not options.dry_run):
                shown = {"kernel": case.kernel, "candidate": case.candidate, "rows": tokens, "vocab": vocab}
                shown |= {"dtype": dtype, "with_entropy": with_entropy}
                late = time.monotonic() > deadline
                yield shown | ({"left_out": "time"} if late else _timed(case, tokens, vocab, dtype, options, bandwidth))


def _from_middle(tokens: int) -> float:
    return abs(tokens - 8192)


def _timed(case: Case, tokens: int, vocab: int, dtype: str, options: argparse.Namespace, bandwidth: float) -> dict:
    """gb_per_s: of the passes made by design. floor_ratio: of the time to that of FLOOR_PASSES at `bandwidth`."""
    try:
        median = median_of(case.run, (tokens, vocab), DTYPES[dtype], options.repeats)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"left_out": "out of memory"}
    gigabytes = tokens * vocab * DTYPES[dtype].itemsize / 1e9
    found = {key: None if value is None else round(value, 4) for key, value in asdict(median).items()}
    floor_ms = 1e3 * FLOOR_PASSES * gigabytes / bandwidth
    found["floor_ratio"] = round(median.ms / floor_ms, 3)
    if case.passes is not None:
        rate = 1e3 * case.passes * gigabytes / median.ms
        found |= {"gb_per_s": round(rate, 1), "percent_of_copy": round(100 * rate / bandwidth, 1)}
    return found


def _environment(device: str, backends: list[str]) -> dict:
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu dry run"
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda, "backends": backends}


def _print(report: dict) -> None:
    where = ", ".join(f"{key} {value}" for key, value in report["environment"].items())
    table = Table(title=f"{where}; copy {report['copy_gb_per_s']} GB/s")
    for name in ("kernel", "candidate", "T", "V", "dtype", "entropy"):
        table.add_column(name)
    for name in ("ms", "x floor of 2 passes", "GB/s", "% of copy", "extra MiB"):
        table.add_column(name, justify="right")
    for row in report["results"]:
        size = [row["kernel"], row["candidate"], *(str(row[key]) for key in ("rows", "vocab", "dtype"))]
        values = [row.get(key) for key in ("ms", "floor_ratio", "gb_per_s", "percent_of_copy", "extra_mib")]
        shown = [row.get("left_out", "-") if value is None else str(value) for value in values]
        table.add_row(*size, "yes" if row["with_entropy"] else "no", *shown)
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main())
