"""Packs samples of any number of turns into a `Part`."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from unirl.types import Completion, Part, SampleStatus, TextSegment


class Row(NamedTuple):
    """One sample: contexts (token ids that were not generated: the prompt, then observations) and completions, as many
    of each, by turns.
    """

    contexts: Sequence[Sequence[int]]
    completions: Sequence[Completion]
    group_id: int
    status: SampleStatus
    record: dict[str, Any]


def pack_rows(rows: Sequence[Row], *, first_sample_id: int) -> Part:
    """One `Part` of the rows, in order, numbered from `first_sample_id`; each is an episode of its own.

    Raises ValueError where a completion's fields differ in length.
    """
    contexts = [context for row in rows for context in row.contexts]
    completions = [completion for row in rows for completion in row.completions]
    for completion in completions:
        if not len(completion.token_ids) == len(completion.log_probs) == len(completion.weight_versions):
            raise ValueError(
                f"completion: found {len(completion.token_ids)} tokens, {len(completion.log_probs)} log-probs and "
                f"{len(completion.weight_versions)} weight versions, expected as many of each"
            )
    turns = np.array([len(row.completions) for row in rows], dtype=np.int64)
    turn_numbers = np.arange(len(completions)) - np.repeat(turns.cumsum() - turns, turns)
    generated_lengths = np.array([len(completion.token_ids) for completion in completions], dtype=np.int64)
    # Contexts and generated spans alternate, row after row.
    span_lengths = np.stack([[len(context) for context in contexts], generated_lengths], axis=1).astype(np.int64)
    generated = np.repeat(np.tile([False, True], len(completions)), span_lengths.reshape(-1))
    row_of_turn = np.repeat(np.arange(len(rows)), turns)
    lengths = np.bincount(row_of_turn, weights=span_lengths.sum(1), minlength=len(rows)).astype(np.int64)

    def spread(values: np.ndarray, elsewhere: float) -> torch.Tensor:
        """Values of the generated tokens, with `elsewhere` on the contexts' tokens."""
        spread = np.full(len(generated), elsewhere, dtype=values.dtype)
        spread[generated] = values
        return torch.from_numpy(spread)

    num_generated = int(generated_lengths.sum())
    spans = chain.from_iterable((ids, done.token_ids) for ids, done in zip(contexts, completions, strict=True))
    sample_ids = torch.arange(first_sample_id, first_sample_id + len(rows))
    text = TextSegment(
        tokens=torch.from_numpy(_flat(spans, np.int64, len(generated))),
        log_probs=spread(_flat((done.log_probs for done in completions), np.float32, num_generated), 0.0),
        loss_mask=torch.from_numpy(generated),
        turn_ids=spread(np.repeat(turn_numbers, generated_lengths), -1),
        weight_versions=spread(_flat((done.weight_versions for done in completions), np.int64, num_generated), -1),
        lengths=torch.from_numpy(lengths),
        sample_ids=sample_ids,
        group_ids=torch.tensor([row.group_id for row in rows], dtype=torch.int64),
        episode_ids=sample_ids.clone(),
        status=torch.tensor([int(row.status) for row in rows], dtype=torch.int64),
    )
    return Part(text=text, records=tuple(row.record for row in rows))


def _flat(spans: Iterable[Iterable], dtype: type, count: int) -> np.ndarray:
    return np.fromiter(chain.from_iterable(spans), dtype=dtype, count=count)
