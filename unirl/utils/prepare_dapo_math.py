"""Prepares DAPO-Math-17k for training and AIME 2024 and 2025 for evaluation: `python -m unirl.utils.prepare_dapo_math`.

Writes `train.jsonl` and `aime_eval.jsonl` as `unirl.data` reads them: one {prompt, answer, data_source, index} a line.
The published training file repeats each of its ~17k problems about a hundred times and asks for an answer after
"Answer:"; the scorers of `unirl.reward` read `\\boxed{}`. So problems are written once, with a boxed instruction.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from unirl.errors import UserError

# What BytedTsinghua-SIA/DAPO-Math-17k and AIME-2024 put around each problem.
PUBLISHED_PREAMBLE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
PUBLISHED_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'
BOXED_INSTRUCTION = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."

# Columns of problem and answer where a file is not in the published schema (prompt, reward_model.ground_truth).
COLUMNS = {"problem": "answer", "Problem": "Answer", "question": "answer"}
PUBLISHED_COLUMNS = ("prompt", "reward_model", "extra_info", "data_source")
EXPECTED = "expected prompt and reward_model, or " + ", or ".join(
    f"{text} and {answer}" for text, answer in COLUMNS.items()
)
AIME_PROBLEMS = 30
AIME_ANSWER = re.compile(r"0*(\d{1,3})(?:\^?\{?\\circ\}?)?")
SHOWN_BAD_ROWS = 5
PARQUET_BATCH = 4096
INSTALL_HINT = 'pip install "unirl-megatron[data]"'


class BadRow(Exception):
    """A row without a usable problem; the message is the reason."""


@dataclass(frozen=True)
class Problem:
    """One problem as published: `prompt` with its instruction, `text` without."""

    prompt: str
    text: str
    answer: str
    data_source: str
    index: Any = None

    @property
    def key(self) -> str:
        """Equal for the same problem: its text without differences in white space."""
        return " ".join(self.text.split())

    def record(self, keep_instruction: bool) -> dict[str, Any]:
        """The line that is written."""
        prompt = self.prompt if keep_instruction else self.text + BOXED_INSTRUCTION
        record = {"prompt": prompt, "answer": self.answer, "data_source": self.data_source}
        return record if self.index is None else {**record, "index": self.index}


@dataclass
class Collection:
    """The different problems of a source by their key, and what became of its other rows."""

    name: str
    problems: dict[str, Problem] = field(default_factory=dict)
    rows: int = 0
    conflicts: int = 0
    asking_otherwise: int = 0
    in_eval: int = 0
    bad_rows: list[tuple[str, str]] = field(default_factory=list)

    def summary(self) -> str:
        """Readable lines."""
        lines = [f"{self.name}: {len(self.problems):,} problems from {self.rows:,} rows"]
        if self.conflicts:
            lines.append(f"  {self.conflicts:,} problems dropped: rows give them different answers")
        if self.in_eval:
            lines.append(f"  {self.in_eval:,} problems dropped: they are evaluation problems")
        if self.asking_otherwise:
            lines.append(
                f'  {self.asking_otherwise:,} problems say "Answer:" outside the published instruction: look at them'
            )
        if self.bad_rows:
            lines.append(f"  {len(self.bad_rows):,} bad rows skipped")
            lines += [f"    {place}: {reason}" for place, reason in self.bad_rows[:SHOWN_BAD_ROWS]]
        return "\n".join(lines)


def collect(name: str, rows: Iterable[tuple[str, Any]], parse: Callable[[Any], Problem]) -> Collection:
    """The different problems among `rows`, (place, row) pairs. A problem with two different answers is dropped.

    Raises UserError where no problem is left.
    """
    found = Collection(name)
    conflicting = set()
    for place, row in rows:
        found.rows += 1
        try:
            problem = parse(row)
        except BadRow as error:
            found.bad_rows.append((place, str(error)))
            continue
        first = found.problems.setdefault(problem.key, problem)
        if first.answer != problem.answer:
            conflicting.add(problem.key)
    for key in conflicting:
        del found.problems[key]
    found.conflicts = len(conflicting)
    found.asking_otherwise = sum("Answer:" in problem.text for problem in found.problems.values())
    if not found.problems:
        raise UserError("no problem is left. " + "; ".join(line.strip() for line in found.summary().splitlines()))
    return found


def parse_row(row: Any) -> Problem:
    """The problem of a row in the published schema or with one of the `COLUMNS`. Raises BadRow."""
    if not isinstance(row, dict):
        raise BadRow(f"not an object but a {type(row).__name__}")
    if row.get("reward_model") is not None:
        prompt, answer = _published(row)
    else:
        columns = next((pair for pair in COLUMNS.items() if row.get(pair[0]) is not None), None)
        if columns is None:
            raise BadRow(f"no problem in the columns {', '.join(row)}; {EXPECTED}")
        prompt, answer = row[columns[0]], row.get(columns[1])
    if not isinstance(prompt, str) or not prompt.strip():
        raise BadRow("the problem must be text that is not empty")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise BadRow("the problem holds half a surrogate pair, which is no Unicode text") from error
    text = prompt.strip().removeprefix(PUBLISHED_PREAMBLE).removesuffix(PUBLISHED_SUFFIX).strip()
    extra = row.get("extra_info")
    return Problem(
        prompt=prompt,
        text=text,
        answer=_answer_text(answer),
        data_source=row.get("data_source") or "math_dapo",
        index=extra.get("index") if isinstance(extra, dict) else None,
    )


def _published(row: dict[str, Any]) -> tuple[Any, Any]:
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        if len(prompt) != 1 or not isinstance(prompt[0], dict) or prompt[0].get("role") != "user":
            raise BadRow("prompt must be one user message")
        prompt = prompt[0].get("content")
    if not isinstance(row["reward_model"], dict):
        raise BadRow("reward_model must hold ground_truth")
    return prompt, row["reward_model"].get("ground_truth")


def _answer_text(answer: Any) -> str:
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)  # A column of integers with gaps is read as floats.
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise BadRow(f"the answer must be text or a number, found {type(answer).__name__}")
    text = str(answer).strip()
    if not text:
        raise BadRow("the answer is empty")
    return text


def aime_parser(label: str) -> Callable[[Any], Problem]:
    """`parse_row` for AIME: the answer as a plain integer ("033" -> "33", a degree sign removed), labelled `label`."""

    def parse(row: Any) -> Problem:
        problem = parse_row(row)
        answer = AIME_ANSWER.fullmatch(problem.answer)
        if answer is None:
            raise BadRow(f"an AIME answer is an integer from 0 to 999, found {problem.answer[:40]!r}")
        return Problem(problem.prompt, problem.text, answer[1], label, problem.index)

    return parse


def read_files(paths: list[Path]) -> Iterator[tuple[str, Any]]:
    """(place, row) of parquet and JSON-lines files, as a stream. A line that is not JSON is handed on as text."""
    for path in paths:
        try:
            yield from _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)
        except OSError as error:
            raise UserError(f"{path}: cannot read it: {error.strerror or error}") from error


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"reading parquet files needs pyarrow: {INSTALL_HINT}") from error
    wanted = {*PUBLISHED_COLUMNS, *COLUMNS, *COLUMNS.values()}
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in wanted]
            if not columns:
                raise UserError(
                    f"{path}: none of its columns is known: {', '.join(file.schema_arrow.names)}; {EXPECTED}"
                )
            number = 0
            for batch in file.iter_batches(batch_size=PARQUET_BATCH, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path.name} row {number}", row
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path}: not a parquet file that can be read: {error}") from error


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix not in (".jsonl", ".json"):
        raise UserError(f"{path}: expected a .parquet, .jsonl or .json file (JSON: one object a line)")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = line.decode(errors="replace")
            yield f"{path.name} line {number}", row


def read_hub(name: str, option: str) -> Iterator[tuple[str, Any]]:
    """(place, row) of all splits of a hub data set, streamed. `option` is the one that takes local files instead."""
    try:
        import datasets
        from huggingface_hub.errors import HTTPError
    except ImportError as error:
        raise UserError(f"reading {name} from the hub needs datasets: {INSTALL_HINT}") from error
    try:
        for split, rows in datasets.load_dataset(name, streaming=True).items():
            for number, row in enumerate(rows, 1):
                yield f"{name} {split} row {number}", row
    except (OSError, ValueError, HTTPError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"cannot read {name} from the Hugging Face hub ({error}); download it elsewhere and name the local files: "
            f"{option} FILE... (parquet or jsonl; the options are --train, --aime24, --aime25)"
        ) from error


def write_all(out_dir: Path, files: dict[str, list[dict[str, Any]]]) -> None:
    """Writes each list as JSON lines; all files are written aside before the first is renamed into place."""
    aside = {out_dir / name: out_dir / f".{name}.{os.getpid()}" for name in files}
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for temporary, records in zip(aside.values(), files.values(), strict=True):
            with temporary.open("w", encoding="utf-8") as handle:
                handle.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
                handle.flush()
                os.fsync(handle.fileno())
        for path, temporary in aside.items():
            temporary.replace(path)
    except OSError as error:
        raise UserError(f"--out-dir {out_dir}: cannot write there: {error.strerror or error}") from error
    finally:
        if out_dir.is_dir():
            for temporary in aside.values():
                temporary.unlink(missing_ok=True)


def prepare(args: argparse.Namespace) -> list[Collection]:
    """Reads the three sources, writes both files and returns what was found: training, AIME 2024, AIME 2025."""
    aime = [
        collect("AIME 2024", _rows(args.aime24, args.aime24_hub, "--aime24"), aime_parser("aime24")),
        collect("AIME 2025", _rows(args.aime25, args.aime25_hub, "--aime25"), aime_parser("aime25")),
    ]
    train = collect("DAPO-Math", _rows(args.train, args.train_hub, "--train"), parse_row)
    for key in {key for source in aime for key in source.problems} & train.problems.keys():
        del train.problems[key]
        train.in_eval += 1
    if not train.problems:
        raise UserError("no training problem is left: all of --train are evaluation problems")
    write_all(
        args.out_dir,
        {
            "train.jsonl": [problem.record(args.keep_instruction) for problem in train.problems.values()],
            "aime_eval.jsonl": [
                problem.record(args.keep_instruction) for source in aime for problem in source.problems.values()
            ],
        },
    )
    return [train, *aime]


def _rows(paths: list[Path] | None, hub_name: str, option: str) -> Iterable[tuple[str, Any]]:
    rows = read_files(paths) if paths else read_hub(hub_name, option)
    description = ", ".join(path.name for path in paths) if paths else hub_name
    return track(rows, description, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m unirl.utils.prepare_dapo_math",
        description="Writes train.jsonl (DAPO-Math-17k, each problem once) and aime_eval.jsonl (AIME 2024 and 2025).",
    )
    parser.add_argument(
        "--out-dir", type=Path, default=Path("data/dapo_math"), help="folder of both files (%(default)s)"
    )
    for name, title, hub_name in (
        ("train", "DAPO-Math-17k", "BytedTsinghua-SIA/DAPO-Math-17k"),
        ("aime24", "AIME 2024", "BytedTsinghua-SIA/AIME-2024"),
        ("aime25", "AIME 2025", "math-ai/aime25"),
    ):
        parser.add_argument(
            f"--{name}", type=Path, nargs="+", metavar="PATH", help=f"local parquet or jsonl files of {title}"
        )
        parser.add_argument(
            f"--{name}-hub", default=hub_name, metavar="NAME", help=f"hub data set of {title} otherwise (%(default)s)"
        )
    parser.add_argument(
        "--keep-instruction",
        action="store_true",
        help='leave prompts as published (they ask for "Answer: ...", which the boxed scorers do not read)',
    )
    args = parser.parse_args()
    try:
        sources = prepare(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for source in sources:
        print(source.summary())
    for source in sources[1:]:
        if len(source.problems) != AIME_PROBLEMS:
            print(f"warning: {source.name} has {AIME_PROBLEMS} problems, found {len(source.problems)}")
    print(f"wrote {args.out_dir / 'train.jsonl'} and {args.out_dir / 'aime_eval.jsonl'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
