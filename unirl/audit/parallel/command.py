"""`python -m unirl.audit parallel`: every layout of ranks against one process."""

import argparse
import math
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from unirl.audit.parallel.layouts import DEFAULT, parse_layouts
from unirl.config.compose import compose
from unirl.config.schema import TrainConfig
from unirl.errors import UserError

if TYPE_CHECKING:
    from unirl.audit.parallel.compare import Difference
    from unirl.audit.parallel.run import Row


def add_parser(subparsers: Any) -> None:
    """Declare the subcommand `parallel`."""
    parser = subparsers.add_parser(
        "parallel",
        help="train the same batches under layouts of ranks and compare them with one process",
        description="Trains the same batches in one process and under layouts of ranks, on the CPU, and compares "
        "log-probs, losses, metrics, gradients and weights.",
    )
    parser.add_argument(
        "--layouts",
        default=DEFAULT,
        help="layouts, separated by commas: tp=, pp=, vpp=, cp=, ep=, dp=, and the switches sp, distributed, overlap, "
        "joined with +; default: %(default)s",
    )
    parser.add_argument("--config-name", help="a recipe: audit its model, algorithm, critic and stack")
    parser.add_argument("--config-dir", action="append", default=[], help="look for recipes here first")
    parser.add_argument(
        "--timeout-s", type=float, default=900.0, help="seconds for all layouts of one number of ranks together"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="with --config-name: set keys of the recipe")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    config = _config(options)
    layouts = parse_layouts(options.layouts, None if config is None else config.parallel)
    from unirl.audit.parallel.run import audit  # Megatron loads only now, for a command line that is valid

    rows = audit(layouts, config, timeout_s=options.timeout_s)
    _print(rows)
    failed, skipped = sum(row.failed for row in rows), sum(row.skipped is not None for row in rows)
    print(f"{len(rows) - failed - skipped} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or skipped == len(rows) else 0


def _config(options: argparse.Namespace) -> TrainConfig | None:
    if options.config_name is not None:
        return compose(options.config_name, options.overrides, options.config_dir, "plan")
    if options.overrides:
        raise UserError(f"found {options.overrides[0]}, but keys are those of a recipe: give --config-name, too")
    return None


def _print(rows: "list[Row]") -> None:
    """A row for each layout: of each quantity, the case that comes closest to what is allowed."""
    from unirl.audit.parallel.compare import QUANTITIES

    shown = QUANTITIES[:-1]  # that ranks agree is yes or no: told where it is no
    console = Console(width=120)
    title = "layouts against one process: the largest difference among the cases of each"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("layout", no_wrap=True)
    for name in shown:
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    table.add_column("pass", no_wrap=True)
    table.add_column("worst gradient", overflow="fold")
    for row in rows:
        table.add_row(row.layout.name, *_cells(row, shown))
    if worst := [worst for row in rows if (worst := _closest(row))]:
        table.add_section()
        allowed = [f"{max(of_row[name].tolerance for of_row in worst):.0e}" for name in shown]
        table.add_row("allowed", *allowed)
    console.print(table)
    for row in rows:
        _explain(row)


def _cells(row: "Row", shown: tuple[str, ...]) -> list[str]:
    worst = _closest(row)
    if not worst:
        return [*("-" for _ in shown), _verdict(row), ""]
    cells = [_red(f"{worst[name].found:.1e}", worst[name].passed) for name in shown]
    where = worst["gradients"].where.replace("model.", "").removesuffix(".weight")
    return [*cells, _verdict(row), where]


def _closest(row: "Row") -> "dict[str, Difference]":
    """Of each quantity, the difference that comes closest to its tolerance, or is farthest beyond it."""
    names = next(iter(row.cases.values()), {})
    return {
        name: max(
            (found[name] for found in row.cases.values()), key=lambda one: one.found / (one.tolerance or math.inf)
        )
        for name in names
    }


def _red(text: str, passed: bool) -> str:
    return text if passed else f"[bold red]{text}[/]"


def _verdict(row: "Row") -> str:
    return "skipped" if row.skipped is not None else _red("NO" if row.failed else "yes", not row.failed)


def _explain(row: "Row") -> None:
    name = row.layout.name
    if row.skipped is not None:
        print(f"skipped {name}: {row.skipped}")
    if row.error is not None:
        print(f"FAILED {name}: {row.error}")
    for case, differences in row.cases.items():
        for quantity, found in differences.items():
            if not found.passed:
                print(
                    f"FAILED {name}, {case}: {quantity}: {found.found:.1e} at {found.where}, allowed "
                    f"{found.tolerance:.0e}"
                )
