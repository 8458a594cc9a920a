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

    Raises ValueError where a completion's fields differ in length, or a token is not in the support that it is said to
    be drawn from.
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
        spread = np.full((len(generated), *values.shape[1:]), elsewhere, dtype=values.dtype)
        spread[generated] = values
        return torch.from_numpy(spread)

    num_generated = int(generated_lengths.sum())
    spans = chain.from_iterable((ids, done.token_ids) for ids, done in zip(contexts, completions, strict=True))
    support = _pack_support([completion for completion in completions if completion.token_ids])
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
        support=None if support is None else spread(support, -1),
    )
    return Part(text=text, records=tuple(row.record for row in rows))


def _flat(spans: Iterable[Iterable], dtype: type, count: int) -> np.ndarray:
    return np.fromiter(chain.from_iterable(spans), dtype=dtype, count=count)


def _pack_support(completions: Sequence[Completion]) -> np.ndarray | None:
    """Of the R tokens of completions, none of which is empty, [R, K] int32: the support of each, filled up with -1 to
    the length of the longest; None where no completion has any.
    """
    if all(completion.support is None for completion in completions):
        return None
    for completion in completions:
        if completion.support is None or len(completion.support) != len(completion.token_ids):
            found = "no support" if completion.support is None else f"the support of {len(completion.support)} tokens"
            raise ValueError(f"completion: found {found}, expected that of its {len(completion.token_ids)} tokens")
    rows = [row for completion in completions for row in completion.support]
    sizes = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    support = np.full((len(rows), sizes.max()), -1, dtype=np.int32)
    support[np.arange(support.shape[1]) < sizes[:, None]] = np.frombuffer(b"".join(rows), dtype=np.int32)
    tokens = _flat((completion.token_ids for completion in completions), np.int32, len(rows))
    outside = np.flatnonzero((support != tokens[:, None]).all(axis=1))
    if outside.size:
        raise ValueError(
            f"completion: found {outside.size} tokens that are not in the support that they were drawn from, the first "
            f"{tokens[outside[0]]} in {rows[outside[0]].tolist()}"
        )
    return support
