"""`load_prompts`: from the `data` section of the config to a `PromptDataset`."""

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from unirl.config.schema import DataConfig
from unirl.data.jsonl import read_jsonl
from unirl.data.prompts import BadLine, LoadReport, PromptDataset
from unirl.data.render import BadRecord, PromptRenderer
from unirl.errors import UserError

TOKENIZE_BATCH = 256

Records = Iterator[tuple[int, dict[str, Any]]]


def load_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Literal["train", "heldout"],
    path: str | None = None,
    max_prompts: int | None = None,
) -> PromptDataset:
    """Reads or makes the prompts of a split, as text and tokens that are really sent.

    kind jsonl reads `path`, or `config.path` for training; kind reasoning_gym makes its problems and takes no path.
    Bad lines, duplicates and prompts of more than `config.max_prompt_tokens` tokens are dropped and accounted for in
    the dataset's `report`. `max_prompts` keeps the first so many prompts.

    Raises UserError where keys contradict the tokenizer or each other, a file cannot be read, or nothing is left.
    """
    renderer = PromptRenderer(config, tokenizer)
    records, report = _open_source(config, split, path)
    dataset = PromptDataset(_select(records, renderer, report, max_prompts), report)
    if not dataset:
        account = "; ".join(line.strip() for line in report.summary().splitlines())
        raise UserError(f"no usable prompt is left. {account}")
    return dataset


def _open_source(config: DataConfig, split: str, path: str | None) -> tuple[Records, LoadReport]:
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be train or heldout, found {split!r}")
    if config.kind == "reasoning_gym":
        if path is not None:
            raise UserError(
                f"a prompt file ({path}) is read with data.kind=jsonl only: data.kind=reasoning_gym makes its own "
                "held-out problems, so leave eval.path null"
            )
        # Imported here: the library takes seconds to import and runs on files do not need it.
        from unirl.data.reasoning_gym import make_problems

        report = LoadReport(f"reasoning_gym {', '.join(config.tasks)} ({split})", config.max_prompt_tokens)
        return make_problems(config, split, report), report
    key = "data.path" if split == "train" else "eval.path"
    if path is None and split == "train":
        path = config.path
    if path is None:
        raise UserError(f"{key} is null: set it to the JSON-lines file of the {split} prompts")
    report = LoadReport(Path(path).name, config.max_prompt_tokens)
    return read_jsonl(path, key, report), report


def _select(
    records: Records, renderer: PromptRenderer, report: LoadReport, limit: int | None
) -> Iterator[tuple[np.ndarray, bytes]]:
    """Token ids and record (as JSON) of each prompt that is kept."""
    distinct = _distinct(records, renderer, report)
    kept = 0
    while limit is None or kept < limit:
        # Never reads past the last prompt that can be kept, so that the report tells of the lines before it alone.
        wanted = TOKENIZE_BATCH if limit is None else min(TOKENIZE_BATCH, limit - kept)
        batch = list(islice(distinct, wanted))
        if not batch:
            return
        tokens = renderer.tokens([text for _, text, _ in batch])
        for (number, _, record), token_ids in zip(batch, tokens, strict=True):
            if len(token_ids) == 0:
                report.bad_lines.append(BadLine(number, "the text has no tokens"))
            elif len(token_ids) > report.max_prompt_tokens:
                report.too_long += 1
            else:
                kept += 1
                yield token_ids, record
    report.notes.append(f"only the first {limit:,} prompts were taken")


def _distinct(records: Records, renderer: PromptRenderer, report: LoadReport) -> Iterator[tuple[int, str, bytes]]:
    """Line number, text as sent and record (as JSON) of each record whose text was not sent before."""
    answers: dict[bytes, bytes] = {}
    for number, record in records:
        answer = _digest(record["answer"])
        try:
            conversation = renderer.conversation(record["prompt"])
            # A published file may repeat a prompt a hundred times: repeats are found before the slow chat template.
            keys = [_digest(json.dumps(conversation))]
            if keys[0] not in answers:
                text = renderer.text(conversation)
                keys.append(_digest(text))
        except BadRecord as error:
            report.bad_lines.append(BadLine(number, str(error)))
            continue
        known = [answers[key] for key in keys if key in answers]
        answers.update((key, known[0] if known else answer) for key in keys)
        if known:
            report.duplicates += 1
            report.conflicts += known[0] != answer
        else:
            yield number, text, json.dumps(record, ensure_ascii=False).encode(errors="surrogatepass")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
