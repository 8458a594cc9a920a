"""Trains the cases of an audit in one process and under every layout, and compares the outcomes where they are made."""

import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from unirl.audit.parallel.cases import default_cases, has_model, recipe_cases
from unirl.audit.parallel.compare import TOLERANCES, Difference, compare
from unirl.audit.parallel.layouts import Layout
from unirl.audit.parallel.train import ParallelCase, train, train_jobs
from unirl.cluster.spawn import RankError, run_ranks
from unirl.config.schema import ParallelConfig, TrainConfig
from unirl.errors import UserError
from unirl.train.megatron.architecture import check_layout, read_architecture
from unirl.train.megatron.runtime import ParallelRuntime


@dataclass(frozen=True)
class Row:
    """What became of a layout. cases: by name, the differences of each quantity.

    skipped: why the model cannot be laid out so. error: why the ranks did not end.
    """

    layout: Layout
    cases: dict[str, dict[str, Difference]] = field(default_factory=dict)
    skipped: str | None = None
    error: str | None = None

    @property
    def failed(self) -> bool:
        """Whether something is beyond its tolerance, or was not found out."""
        found = [one for differences in self.cases.values() for one in differences.values()]
        return self.error is not None or not all(one.passed for one in found)


@dataclass(frozen=True)
class _Work:
    """A layout, and its cases with the file of the outcome that each has in one process."""

    layout: Layout
    cases: list[tuple[ParallelCase, Path]]


def audit(layouts: Sequence[Layout], config: TrainConfig | None = None, *, timeout_s: float = 900.0) -> list[Row]:
    """A row for each layout, in their order; `timeout_s` for all layouts of one number of ranks together.

    config: the recipe whose model, algorithm, critic and stack are audited; None: small models and every loss, with
    experts under layouts that split those. What goes on is told on stderr.
    """
    with tempfile.TemporaryDirectory(prefix="unirl-audit-") as folder:
        root = Path(folder)
        cases = _cases(layouts, config, root)
        reasons = {layout: _refusal(cases[layout], layout.parallel) for layout in layouts}
        rows = {layout: Row(layout, skipped=reason) for layout, reason in reasons.items() if reason is not None}
        accepted = [layout for layout in layouts if reasons[layout] is None]
        expected = _train_alone([case for layout in accepted for case in cases[layout]], root)
        work = [_Work(layout, [(case, expected[case.name]) for case in cases[layout]]) for layout in accepted]
        for num_ranks in sorted({layout.num_ranks for layout in accepted}):
            together = [one for one in work if one.layout.num_ranks == num_ranks]
            rows |= _run_together(together, num_ranks, timeout_s)
    return [rows[layout] for layout in layouts]


def _cases(layouts: Sequence[Layout], config: TrainConfig | None, root: Path) -> dict[Layout, list[ParallelCase]]:
    if config is not None:
        if not has_model(config.model.path):
            _say(f"model.path={config.model.path} is no folder here: a small random model takes its place")
        of_recipe = recipe_cases(config, root)
        return dict.fromkeys(layouts, of_recipe)
    has_experts = {layout: layout.parallel.ep > 1 for layout in layouts}
    made = {experts: default_cases(root, experts=experts) for experts in set(has_experts.values())}
    return {layout: made[experts] for layout, experts in has_experts.items()}


def _refusal(cases: Sequence[ParallelCase], parallel: ParallelConfig) -> str | None:
    """Why a model of the cases cannot be laid out so."""
    for path, trusted in {(case.model.path, case.model.trust_remote_code) for case in cases}:
        try:
            check_layout(read_architecture(Path(path), trust_remote_code=trusted), parallel)
        except UserError as error:
            return str(error)
    return None


def _train_alone(cases: Sequence[ParallelCase], root: Path) -> dict[str, Path]:
    """Train each case in one process; by its name, the file of the outcome."""
    files = {}
    for case in cases:
        if case.name not in files:
            _say(f"one process: {case.name}")
            (outcome,) = train_jobs([(case, ParallelConfig())], 1)
            files[case.name] = root / f"outcome_{len(files)}.pt"
            torch.save(outcome, files[case.name])
    return files


def _run_together(work: list[_Work], num_ranks: int, timeout_s: float) -> dict[Layout, Row]:
    """The rows of layouts of one number of ranks; where a rank fails, none of them is known."""
    try:
        by_rank = run_ranks(_compare_on_rank, num_ranks, work, timeout_s=timeout_s)
    except RankError as error:
        return {one.layout: Row(one.layout, error=str(error)) for one in work}
    rows = {}
    for one, found in zip(work, zip(*by_rank, strict=True), strict=True):
        (differences,) = [of_rank for of_rank in found if of_rank]
        rows[one.layout] = Row(one.layout, differences)
    return rows


def _compare_on_rank(work: list[_Work]) -> list[dict[str, dict[str, Difference]]]:
    """On every rank; the differences by case of each layout, {} on all ranks but one."""
    # Megatron calls torch's collectives by their older names.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    rows = []
    for done, one in enumerate(work):
        if dist.get_rank() == 0:
            _say(f"{dist.get_world_size()} ranks, layout {done + 1} of {len(work)}: {one.layout.name}")
        differences = {}
        with ParallelRuntime(one.layout.parallel, seed=0):  # held, so that the groups are made once for all cases
            for case, expected in one.cases:
                outcome = train(case, one.layout.parallel)
                if outcome is not None:
                    reference = torch.load(expected, weights_only=False)  # this program's own file
                    differences[case.name] = compare(outcome, reference, TOLERANCES[case.model.dtype])
        rows.append(differences)
    return rows


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
