"""Records from a JSON-lines file, read as a stream."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import wrap_file

from unirl.data.prompts import BadLine, LoadReport
from unirl.data.render import BadRecord, check_prompt
from unirl.errors import UserError

PROGRESS_FROM_BYTES = 64 * 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_jsonl(path: str, key: str, report: LoadReport) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers (from 1) and records of the file; bad lines go to `report`, blank lines are passed over.

    A record has `prompt`, `answer` (a number becomes a string) and `data_source` (the file's name without its ending
    where the line has none). `key` is the config key that names the file, for the messages. A large file shows its
    progress on a terminal.
    """
    file = Path(path)
    try:
        size = file.stat().st_size
        handle = file.open("rb")
    except OSError as error:
        raise UserError(f"{key}={path}: cannot read the prompts: {error.strerror}") from error
    with handle:
        show = size >= PROGRESS_FROM_BYTES and sys.stderr.isatty()
        progress = wrap_file(handle, size, description=file.name, console=Console(stderr=True), disable=not show)
        with progress as lines:
            for number, line in enumerate(lines, 1):
                if number == 1:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                if not line.strip():
                    continue
                try:
                    yield number, parse_line(line, default_source=file.stem)
                except BadRecord as error:
                    report.bad_lines.append(BadLine(number, str(error)))


def parse_line(line: bytes, default_source: str) -> dict[str, Any]:
    """The record in one line. Raises BadRecord with the reason where there is none."""
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise BadRecord("not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise BadRecord(f"not a JSON object but a {type(record).__name__}")
    if "prompt" not in record:
        raise BadRecord("prompt is missing")
    check_prompt(record["prompt"])
    record["answer"] = _answer(record)
    source = record.setdefault("data_source", default_source)
    if not isinstance(source, str) or not source.strip():
        raise BadRecord("data_source must be text that is not empty")
    return record


def _answer(record: dict[str, Any]) -> str:
    if "answer" not in record:
        raise BadRecord("answer is missing")
    answer = record["answer"]
    if isinstance(answer, str):
        if not answer.strip():
            raise BadRecord("answer is empty")
        return answer
    if isinstance(answer, bool) or not isinstance(answer, (int, float)):
        raise BadRecord(f"answer must be text or a number, found {type(answer).__name__}")
    if not math.isfinite(answer):
        raise BadRecord(f"answer must be a finite number, found {answer}")
    return str(answer)
