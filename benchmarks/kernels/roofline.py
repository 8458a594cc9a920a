"""GPU kernels without a GPU: what the compiled code says of them, and a modelled time against the memory's floor.

    python -m benchmarks.kernels.roofline            # the tables; exit code 1 where a gate or a baseline does not hold
    python -m benchmarks.kernels.roofline --update   # writes the baselines of these compilers

The times are MODELLED, not measured: docs/kernels_gpu.md says how.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.kernels.compiled import BYTES, SIZES, RowKernel, cuda_kernels, triton_kernels
from benchmarks.kernels.machines import MACHINES, THREADS_PER_SM, Machine, model
from benchmarks.kernels.toolchain import ROOT, compiler_version

BASELINES = ROOT / "benchmarks" / "results" / "roofline"
TARGETS = {"single-read": 1.25, "three-pass": 1.2}
"""Largest modelled time over the floor on an H200 in bfloat16 with T = 8192, V = 151,936."""
TARGET_CASE = ("H200", "bfloat16", 8192, 151_936)
# How far a number may rise above its baseline: compilers of one version do not differ, so this is for small edits.
TOLERANCE = {"registers": 8, "instructions_per_element": 0.5, "exponentials_per_element": 0.1, "ratio": 0.03}


@dataclass(frozen=True)
class Route:
    """A way from logits to gradient: kernels that run one after the other. passes: of its floor."""

    name: str
    kernels: tuple[str, ...]
    passes: int


PATHS = {
    "cuda": (
        Route("single-read", ("policy_rows",), 2),
        Route("three-pass", ("row_records", "write_gradient"), 3),
    ),
    "triton": (
        Route("three-pass", ("chunk_statistics", "write_gradient"), 3),
        Route("three-pass with entropy", ("chunk_statistics-entropy", "write_gradient-entropy"), 3),
    ),
}


def main() -> None:
    options = _options()
    failures: list[str] = []
    for backend in options.backends:
        with tempfile.TemporaryDirectory() as folder:
            version, kernels = _compile(backend, Path(folder))
        report = {
            "compiler": version,
            "kernels": dict(_code_rows(kernels)),
            "times": dict(_time_rows(backend, kernels)),
        }
        _print(backend, report)
        failures += [f"{backend}: {failure}" for failure in gates(report)]
        baseline = BASELINES / f"{version}.json"
        if options.update:
            baseline.parent.mkdir(parents=True, exist_ok=True)
            baseline.write_text(json.dumps(report, indent=1) + "\n")
        elif baseline.exists():
            failures += [f"{baseline.name}: {change}" for change in compare(report, json.loads(baseline.read_text()))]
        else:
            print(f"no baseline for {version}: --update writes {baseline.relative_to(ROOT)}")
    for failure in failures:
        print(f"FAILED {failure}")
    sys.exit(1 if failures else 0)


def gates(report: dict) -> list[str]:
    """What must hold of every kernel, whatever the baselines say."""
    failures = []
    for name, row in report["kernels"].items():
        if row["local_accesses"] or row["stack"]:
            failures.append(f"{name}: spills ({row['local_accesses']} local accesses, {row['stack']} bytes of stack)")
        if row["access_bits"] != [128]:
            failures.append(f"{name}: accesses of {row['access_bits']} bits, expected 128 only")
    for path, target in TARGETS.items():
        row = report["times"].get(_case(path, *TARGET_CASE))
        if row and row["ratio"] > target:
            failures.append(f"{path}: modelled at {row['ratio']} times its floor, the target is {target}")
    return failures


def compare(report: dict, baseline: dict) -> list[str]:
    """What has become worse than the baseline by more than TOLERANCE, or is not in both."""
    changes = []
    for table in ("kernels", "times"):
        changes += [f"{name}: not in both of report and baseline" for name in report[table].keys() ^ baseline[table]]
        for name in sorted(report[table].keys() & baseline[table].keys()):
            for key, allowed in TOLERANCE.items():
                found, before = report[table][name].get(key, 0), baseline[table][name].get(key, 0)
                if found > before + allowed:
                    changes.append(f"{name}: {key} was {before}, is {found}")
    return changes


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels.roofline", description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", choices=PATHS, default=list(PATHS), help="default: both")
    parser.add_argument("--update", action="store_true", help="write the baselines of these compilers")
    return parser.parse_args()


def _compile(backend: str, folder: Path) -> tuple[str, list[RowKernel]]:
    if backend == "cuda":
        archs = sorted({machine.arch_nvcc for machine in MACHINES})
        return compiler_version(), [kernel for arch in archs for kernel in cuda_kernels(arch, folder)]
    import triton

    archs = sorted({machine.arch_triton for machine in MACHINES})
    return f"triton-{triton.__version__}", [kernel for arch in archs for kernel in triton_kernels(arch, folder)]


def _code_rows(kernels: list[RowKernel]) -> Iterator[tuple[str, dict]]:
    for kernel in kernels:
        yield (
            f"{kernel.name} {kernel.dtype} {kernel.arch}",
            {
                "registers": kernel.code.registers,
                "stack": kernel.code.stack,
                "local_accesses": kernel.code.local_accesses,
                "shared_bytes": kernel.shared_bytes,
                "blocks_per_sm": kernel.resident,
                "occupancy": round(kernel.resident * kernel.threads / THREADS_PER_SM, 3),
                "access_bits": sorted(kernel.widths),
                "bytes_per_element": kernel.passes * BYTES[kernel.dtype],
                "instructions_per_element": round(kernel.per_element(lambda loop: loop.instructions), 2),
                "exponentials_per_element": round(kernel.per_element(lambda loop: loop.exponentials), 2),
            },
        )


def _time_rows(backend: str, kernels: list[RowKernel]) -> Iterator[tuple[str, dict]]:
    by_name = {(kernel.name, kernel.dtype, kernel.arch): kernel for kernel in kernels}
    for path in PATHS[backend]:
        for machine in MACHINES:
            arch = machine.arch_nvcc if backend == "cuda" else machine.arch_triton
            for dtype in BYTES:
                chosen = [by_name[name, dtype, arch] for name in path.kernels]
                for rows, columns in SIZES:
                    case = _case(path.name, machine.name, dtype, rows, columns)
                    yield case, _time_row(machine, chosen, path.passes, rows, columns)


def _time_row(machine: Machine, kernels: list[RowKernel], passes: int, rows: int, columns: int) -> dict:
    times = [model(machine, kernel.work(machine, rows, columns)) for kernel in kernels]
    floor = passes * rows * columns * BYTES[kernels[0].dtype] / machine.bandwidth
    seconds = sum(time.seconds for time in times)
    return {
        "modelled_us": round(seconds * 1e6, 1),
        "floor_us": round(floor * 1e6, 1),
        "ratio": round(seconds / floor, 3),
        "bound": [time.bound for time in times],
        "shares_of_memory": [{name: round(share, 2) for name, share in time.shares.items()} for time in times],
    }


def _case(path: str, machine: str, dtype: str, rows: int, columns: int) -> str:
    return f"{path} {machine} {dtype} T={rows} V={columns}"


def _print(backend: str, report: dict) -> None:
    console = Console(width=None if sys.stdout.isatty() else 220)
    console.print(f"{backend}: {report['compiler']}, compiled code; times are modelled, not measured", highlight=False)
    for title in ("kernels", "times"):
        rows = report[title]
        columns = [name for name in next(iter(rows.values())) if name != "shares_of_memory"]
        table = Table("", *columns)
        for name, row in rows.items():
            table.add_row(name, *(_cell(row[column]) for column in columns))
        console.print(table)


def _cell(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    main()
