"""Prompts as the rollout engine gets them, and the account of how they were chosen."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

SHOWN_BAD_LINES = 5


@dataclass(frozen=True)
class Prompt:
    """One prompt: `index` is its place in the dataset, `token_ids` are exactly the tokens that are sent.

    `record` holds `prompt` (text or chat messages as given), `answer` (string), `data_source` (string) and every other
    field of the source's record. It is JSON-serialisable.
    """

    index: int
    token_ids: tuple[int, ...]
    record: dict[str, Any]


class BadLine(NamedTuple):
    """A line that holds no usable prompt. `line` counts from 1."""

    line: int
    reason: str


@dataclass
class LoadReport:
    """What became of the records of one source.

    `duplicates` send the same text as an earlier record; `conflicts` of them gave it another answer. `too_long` prompts
    exceed data.max_prompt_tokens. `in_heldout` training problems are also held-out ones. `notes` are whole sentences.
    """

    source: str
    max_prompt_tokens: int
    kept: int = 0
    too_long: int = 0
    duplicates: int = 0
    conflicts: int = 0
    in_heldout: int = 0
    bad_lines: list[BadLine] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Readable lines: one for what was kept, one for each kind of loss that happened."""
        lines = [f"{self.source}: {self.kept:,} prompts"]
        if self.too_long:
            lines.append(f"  {self.too_long:,} dropped: longer than data.max_prompt_tokens={self.max_prompt_tokens}")
        if self.duplicates:
            other = f" ({self.conflicts:,} of them with another answer)" if self.conflicts else ""
            lines.append(f"  {self.duplicates:,} dropped: same text as an earlier prompt{other}")
        if self.in_heldout:
            lines.append(f"  {self.in_heldout:,} dropped: same question as a held-out problem")
        if self.bad_lines:
            lines.append(f"  {len(self.bad_lines):,} bad lines skipped")
            lines += [f"    line {bad.line}: {bad.reason}" for bad in self.bad_lines[:SHOWN_BAD_LINES]]
        if len(self.bad_lines) > SHOWN_BAD_LINES:
            lines.append(f"    ... and {len(self.bad_lines) - SHOWN_BAD_LINES:,} more")
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


class PromptDataset(Sequence[Prompt]):
    """A sequence of `Prompt`s and the `report` of how they were loaded.

    Tokens lie in one int32 array and records as JSON bytes, so that two million prompts take about twice their file's
    size; a `Prompt` is made when it is asked for.
    """

    def __init__(self, entries: Iterable[tuple[np.ndarray, bytes]], report: LoadReport):
        """`entries`: token ids [L] int32 and the record as JSON, prompt after prompt. Sets `report.kept`."""
        self.report = report
        self._records: list[bytes] = []
        packed, bounds = bytearray(), [0]
        for token_ids, record in entries:
            packed += token_ids.astype(np.int32, copy=False).tobytes()
            bounds.append(bounds[-1] + len(token_ids))
            self._records.append(record)
        self._tokens = np.frombuffer(packed, dtype=np.int32)
        self._bounds = np.asarray(bounds, dtype=np.int64)
        report.kept = len(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int | slice) -> "Prompt | list[Prompt]":
        """The prompt at `index` (negative counts from the end; IndexError outside), or those of a slice as a list."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"prompt {index} of a dataset of {len(self)}")
        index = index % len(self)
        token_ids = self._tokens[self._bounds[index] : self._bounds[index + 1]]
        return Prompt(index, tuple(token_ids.tolist()), json.loads(self._records[index]))

    def fingerprint(self) -> str:
        """Hex digest of all tokens and records: equal for equal datasets. Tells a resumed run that its data changed."""
        digest = hashlib.blake2b(self._tokens.tobytes(), digest_size=16)
        digest.update(self._bounds.tobytes())
        for record in self._records:
            digest.update(record)
        return digest.hexdigest()
