"""`python -m unirl.audit rollout`: do the rollout engine and the actor of a recipe give tokens the same log-probs?"""

import argparse
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from unirl.config.command import load_config

if TYPE_CHECKING:
    from unirl.audit.rollout_checks import Check

LIMITS = {"float32": (1e-5, 1e-4), "bfloat16": (0.02, 0.15)}
"""By model.dtype: largest mean and 99th percentile of |log-prob of engine - log-prob of actor| that pass."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "rollout",
        help="log-probs of the rollout engine against the actor's, of a recipe",
        description="Start engine and actor of a recipe, sample at several temperatures, lengths and batch sizes and "
        "after weight syncs, replay under the actor. Options and key=value as of unirl.train_ar.",
    )
    parser.add_argument("--config-name", required=True, help="the recipe")
    parser.add_argument("--config-dir", action="append", default=[], help="look for recipes here first")
    parser.add_argument("--mean-limit", type=float, help="largest mean difference that passes (default: by dtype)")
    parser.add_argument("--p99-limit", type=float, help="largest 99th percentile that passes (default: by dtype)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config keys")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    folders = [f"--config-dir={folder}" for folder in options.config_dir]
    config = load_config([f"--config-name={options.config_name}", *folders, *options.overrides])
    from unirl.audit.rollout_checks import run_checks  # Megatron loads for this audit only, and for a valid config

    default_mean, default_p99 = LIMITS[config.model.dtype]
    checks = list(run_checks(config, options.mean_limit or default_mean, options.p99_limit or default_p99))
    _print(checks)
    failed = [check for check in checks if not check.passed]
    print(f"{len(checks) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def _print(checks: list["Check"]) -> None:
    table = Table("batch", "tokens", "mean", "p99", "max", "")
    for check in checks:
        numbers = (f"{value:.2g}" for value in (check.mean, check.p99, check.largest))
        table.add_row(check.about, str(check.tokens), *numbers, "pass" if check.passed else "[bold]FAIL")
    Console(soft_wrap=True).print(table)
