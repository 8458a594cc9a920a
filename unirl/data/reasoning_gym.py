"""Problems of the reasoning-gym library: made, split into training and held-out, and verified by the library itself.

https://github.com/open-thought/reasoning-gym
"""

import dataclasses
import difflib
import functools
import json
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import reasoning_gym
from reasoning_gym.factory import DATASETS
from rich.console import Console
from rich.progress import Progress

from unirl.config.schema import DataConfig
from unirl.data.prompts import LoadReport
from unirl.errors import UserError

SPLITS = {"heldout": 0, "train": 1}
CHUNK = 1000
# A space of questions counts as exhausted when this many draws in a row (or as many as were found) bring nothing new.
PATIENCE = 1000
PROGRESS_FROM_PROBLEMS = 1000
# Families that walk over sets of strings while they draw: other problems in each process unless the hash seed is set.
HASH_SEEDED = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)


class Draw(NamedTuple):
    """Problems of one family with different questions, and the draws that brought none."""

    entries: list[dict[str, Any]]
    repeated: int
    in_heldout: int


def make_problems(config: DataConfig, split: str, report: LoadReport) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbers (from 1) and records of the split's problems, families by turns; what is dropped goes to `report`.

    Held-out problems are made first, from their own seed; training problems whose question is held out, or came before,
    are dropped. Each family gives an equal share of `data.size` (`data.heldout_size`), or as many as it has.

    A record has `prompt` (the question), `answer` ("" where the library has only a verifier), `data_source` (the
    family), the library's `metadata`, and `task` = {family, params, answer as the library gave it} for `verify`.

    Raises UserError for an unknown family or parameter, a value that the library refuses, or a family whose problems
    cannot be verified from a JSON record.
    """
    if not config.tasks:
        raise UserError("data.tasks is empty: name at least one family, e.g. data.tasks={chain_sum: {min_terms: 3}}")
    tasks = {family: check_task(family, params) for family, params in config.tasks.items()}
    draws = _draw_all(tasks, config, "heldout", config.heldout_size, frozenset(), report)
    if split == "train":
        heldout = frozenset(entry["question"] for draw in draws.values() for entry in draw.entries)
        report.notes.clear()  # Of the held-out problems: they stand in the report of that split.
        draws = _draw_all(tasks, config, "train", config.size, heldout, report)
    report.duplicates += sum(draw.repeated for draw in draws.values())
    report.in_heldout += sum(draw.in_heldout for draw in draws.values())
    by_family = [
        [make_record(family, tasks[family], entry) for entry in draw.entries] for family, draw in draws.items()
    ]
    by_turns = (record for turn in zip_longest(*by_family) for record in turn if record is not None)
    yield from enumerate(by_turns, 1)


def check_task(family: str, params: Any) -> dict[str, Any]:
    """A family's parameters as a dict (None: all defaults). Raises UserError where the library would not take them."""
    if family not in DATASETS:
        raise UserError(f"data.tasks.{family}: reasoning_gym has no such family{_nearest(family, DATASETS)}")
    if not isinstance(params, Mapping | None):
        raise UserError(f"data.tasks.{family} must be the family's parameters, e.g. {{}}, found {params!r}")
    known = {field.name for field in dataclasses.fields(DATASETS[family][1])}
    for name in params or {}:
        if name in ("seed", "size"):
            raise UserError(f"data.tasks.{family}.{name} is decided by data.seed, data.size and data.heldout_size")
        if name not in known:
            raise UserError(f"data.tasks.{family} has no parameter {name}{_nearest(name, known)}")
    params = dict(params or {})
    try:
        reasoning_gym.create_dataset(family, **params, seed=0, size=1)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"data.tasks.{family}: reasoning_gym refuses {params}: {error}") from error
    return params


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; it knows {', '.join(sorted(known))}"


def _draw_all(
    tasks: dict[str, dict[str, Any]],
    config: DataConfig,
    split: str,
    size: int,
    heldout: frozenset[str],
    report: LoadReport,
) -> dict[str, Draw]:
    draws = {}
    for position, (family, params) in enumerate(tasks.items()):
        wanted = size // len(tasks) + (position < size % len(tasks))
        draws[family] = draw = draw_problems(family, params, config.seed, split, wanted, heldout)
        if len(draw.entries) < wanted:
            report.notes.append(
                f"{family}: {len(draw.entries):,} of {wanted:,} problems: "
                "these parameters allow no more different questions"
            )
        if draw.entries:
            _check_verifiable(family, params, draw.entries[0])
        if family in HASH_SEEDED and os.environ.get("PYTHONHASHSEED", "random") == "random":
            report.notes.append(
                f"{family}: other problems in each process; set PYTHONHASHSEED=0 to resume or repeat a run"
            )
    return draws


def draw_problems(
    family: str, params: dict[str, Any], seed: int, split: str, wanted: int, heldout: frozenset[str]
) -> Draw:
    """Up to `wanted` problems of a family whose questions differ from each other and from `heldout`."""
    entries: list[dict[str, Any]] = []
    questions: set[str] = set()
    stream = _stream(family, params, seed, split)
    repeated = in_heldout = idle = 0
    show = wanted >= PROGRESS_FROM_PROBLEMS and sys.stderr.isatty()
    with Progress(console=Console(stderr=True), disable=not show, transient=True) as progress:
        bar = progress.add_task(f"{family} ({split})", total=wanted)
        while len(entries) < wanted and idle < max(PATIENCE, len(entries)):
            entry = next(stream)
            question = entry["question"]
            idle += 1
            if question in questions:
                repeated += 1
            elif question in heldout:
                in_heldout += 1
            else:
                questions.add(question)
                entries.append(entry)
                progress.advance(bar)
                idle = 0
    return Draw(entries, repeated, in_heldout)


def _stream(family: str, params: dict[str, Any], seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Problems without end. In chunks, since some families prepare all problems of a dataset when it is made."""
    chunk = 0
    while True:
        key = (zlib.crc32(family.encode()), SPLITS[split], chunk)
        # Below 2**31 - CHUNK: the library adds the problem's number to the seed, and some families hand it to numpy.
        chunk_seed = int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1)[0]) >> 2
        yield from reasoning_gym.create_dataset(family, **params, seed=chunk_seed, size=CHUNK)
        chunk += 1


def make_record(family: str, params: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """The record of one problem of the library."""
    return {
        "prompt": entry["question"],
        "answer": "" if entry["answer"] is None else str(entry["answer"]),
        "data_source": family,
        "metadata": entry["metadata"],
        "task": {"family": family, "params": params, "answer": entry["answer"]},
    }


def _check_verifiable(family: str, params: dict[str, Any], entry: dict[str, Any]) -> None:
    """Some verifiers compare tuples of `metadata`, which are lists in JSON."""
    record = make_record(family, params, entry)
    try:
        stored = json.loads(json.dumps(record))
    except TypeError as error:
        raise UserError(
            f"data.tasks.{family}: its problems do not fit into JSON ({error}): choose another family"
        ) from error
    direct, from_json = (verify(each, entry["answer"]) for each in (record, stored))
    if direct != from_json:
        raise UserError(
            f"data.tasks.{family}: once a problem went through JSON, the library's verifier gives {from_json} "
            f"instead of {direct} to its own answer: choose another family"
        )


def verify(record: dict[str, Any], answer: str | None) -> float:
    """The library's own grade, mostly in [0, 1], of an answer (None: no answer found) to a record of `make_problems`.

    Errors that the family's verifier raises on a strange answer pass through.
    """
    task = record.get("task")
    if not isinstance(task, dict) or "family" not in task:
        raise UserError(
            "the prompt's record has no reasoning_gym task: the reasoning_gym scorer needs data.kind=reasoning_gym"
        )
    verifier = _verifier(task["family"], json.dumps(task["params"]))
    entry = {"question": record["prompt"], "answer": task["answer"], "metadata": record["metadata"]}
    return float(verifier.score_answer(answer, entry))


@functools.cache
def _verifier(family: str, params: str) -> Any:
    return reasoning_gym.create_dataset(family, **json.loads(params), seed=0, size=1)
