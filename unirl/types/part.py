"""`Part`: N samples as one unit of data, with their tokens packed in a `TextSegment`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from unirl import algorithms

_TOKEN_FIELDS = {
    "tokens": torch.int64,
    "log_probs": torch.float32,
    "loss_mask": torch.bool,
    "turn_ids": torch.int64,
    "weight_versions": torch.int64,
}
TOKEN_ESTIMATES = ("advantages", "prox_logp", "ref_logp", "values", "returns")
"""Fields of a `Part` that hold one float32 per token, or None, and that training reads."""

_BY_TOKEN = (*TOKEN_ESTIMATES, "turn_rewards")

_SAMPLE_FIELDS = {
    "lengths": torch.int64,
    "sample_ids": torch.int64,
    "group_ids": torch.int64,
    "episode_ids": torch.int64,
    "status": torch.int64,
}


@dataclass(frozen=True)
class TextSegment:
    """The tokens of N samples, packed one after the other, T tokens in all (CPU tensors).

    Every token tensor is aligned to the token itself: `log_probs[t]` = log p(tokens[t] | tokens[<t]).

    tokens [T] int64: prompt and generated tokens of each sample.
    log_probs [T] float32: rollout log-probs in nats (`rollout_logp`); 0 where `loss_mask` is False.
    loss_mask [T] bool: True on generated tokens.
    turn_ids [T] int64: number of the generated span within its sample, -1 where not generated.
    weight_versions [T] int64: weight version that drew the token, -1 where not generated.
    lengths [N] int64: tokens of each sample, sum = T.
    sample_ids, group_ids, episode_ids [N] int64.
    status [N] int64: `SampleStatus` values.
    support [T, K] int32, or None where tokens were drawn from the whole vocabulary: the tokens that each was drawn
        from, K of them or fewer, in any order and filled up with -1, none where not generated. All log-probs of the
        token, those in `log_probs` and those of every policy, are then of the softmax over these tokens alone.

    Raises ValueError on a wrong dtype or shape.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    loss_mask: torch.Tensor
    turn_ids: torch.Tensor
    weight_versions: torch.Tensor
    lengths: torch.Tensor
    sample_ids: torch.Tensor
    group_ids: torch.Tensor
    episode_ids: torch.Tensor
    status: torch.Tensor
    support: torch.Tensor | None = None

    def __post_init__(self):
        num_tokens, num_samples = int(self.lengths.sum()), self.lengths.numel()
        for expected, dtypes in ((num_tokens, _TOKEN_FIELDS), (num_samples, _SAMPLE_FIELDS)):
            for name, dtype in dtypes.items():
                value = getattr(self, name)
                if value.dtype != dtype or tuple(value.shape) != (expected,):
                    raise ValueError(
                        f"TextSegment.{name}: found {value.dtype} {tuple(value.shape)}, expected {dtype} ({expected},)"
                    )
        support = self.support
        if support is not None and (support.dtype, support.dim(), len(support)) != (torch.int32, 2, num_tokens):
            raise ValueError(
                f"TextSegment.support: found {support.dtype} {tuple(support.shape)}, expected torch.int32 "
                f"({num_tokens}, K)"
            )

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """[N+1] int64: sample i holds tokens cu_seqlens[i] to cu_seqlens[i+1]."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    @property
    def response_lengths(self) -> torch.Tensor:
        """[N] int64: generated tokens of each sample."""
        return self.sum_by_sample(self.loss_mask.long())

    @property
    def prompt_lengths(self) -> torch.Tensor:
        """[N] int64: tokens of each sample that stand before its first generated one."""
        generated = self.loss_mask.long().cumsum(0)  # up to the token itself
        before_sample = torch.cat([generated.new_zeros(1), generated])[self.cu_seqlens[:-1]]
        return self.sum_by_sample((generated == before_sample[self.token_sample_index]).long())

    @property
    def token_sample_index(self) -> torch.Tensor:
        """[T] int64: position (0..N-1) of the sample that a token belongs to."""
        return torch.repeat_interleave(torch.arange(self.lengths.numel()), self.lengths)

    @property
    def turn_ends(self) -> torch.Tensor:
        """[K] int64: positions in [0, T) of the last token of every generated span, ascending."""
        sample, ends = self.token_sample_index, self.loss_mask.clone()
        ends[:-1] &= (self.turn_ids[1:] != self.turn_ids[:-1]) | (sample[1:] != sample[:-1])
        return ends.nonzero().flatten()

    @property
    def turn_counts(self) -> torch.Tensor:
        """[N] int64: generated spans of each sample."""
        return torch.bincount(self.token_sample_index[self.turn_ends], minlength=self.lengths.numel())

    def sum_by_sample(self, values: torch.Tensor) -> torch.Tensor:
        """values [T] -> [N], summed over each sample's tokens (dtype kept)."""
        return values.new_zeros(self.lengths.numel()).index_add_(0, self.token_sample_index, values)

    def group_positions(self) -> list[torch.Tensor]:
        """Of each group, in ascending order of ids, the positions of its samples: int64, ascending."""
        index, counts = torch.unique(self.group_ids, return_inverse=True, return_counts=True)[1:]
        return list(torch.argsort(index, stable=True).split(counts.tolist()))

    def token_positions(self, samples: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """samples [M] int64 -> positions in [0, T) of their tokens, sample after sample in the order given; with
        `lengths` [M] int64, of the first so many tokens of each.
        """
        starts = self.cu_seqlens[:-1][samples]
        lengths = self.lengths[samples] if lengths is None else lengths
        within = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        return torch.repeat_interleave(starts, lengths) + within

    def select(self, samples: torch.Tensor, lengths: torch.Tensor | None = None) -> "TextSegment":
        """The samples at the positions `samples` [M] int64, in that order, repeats allowed; with `lengths` [M] int64,
        the first so many tokens of each.
        """
        tokens = self.token_positions(samples, lengths)
        by_sample = {name: getattr(self, name)[samples] for name in _SAMPLE_FIELDS}
        if lengths is not None:
            by_sample["lengths"] = lengths
        support = None if self.support is None else self.support[tokens]
        by_token = {name: getattr(self, name)[tokens] for name in _TOKEN_FIELDS}
        return TextSegment(**by_token, **by_sample, support=support)

    @staticmethod
    def concat(segments: Sequence["TextSegment"]) -> "TextSegment":
        """One segment of all samples, in order. All that have a generated token must have a support, or none."""
        names = (*_TOKEN_FIELDS, *_SAMPLE_FIELDS)
        joined = {name: torch.cat([getattr(segment, name) for segment in segments]) for name in names}
        return TextSegment(**joined, support=_joined_support(segments))


@dataclass(frozen=True)
class Part:
    """N samples as one unit of data.

    text: the packed tokens.
    records: one dict per sample, the prompt record (`prompt`, `answer`, `data_source`, other fields kept).
    rewards [N] float32 or None before grading; NaN = no verdict (the sample is left out of training).

    Per token, float32 [T], aligned to the token itself like everything in `text`, None until computed, 0 where
    `loss_mask` is False: `advantages`; `prox_logp` and `ref_logp`, log-probs of the proximal and the reference policy;
    `values` and `returns` of the critic; `turn_rewards`, the reward of each turn on its last token, None where a sample
    has but its `rewards`.
    """

    text: TextSegment
    records: tuple[dict[str, Any], ...]
    rewards: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    prox_logp: torch.Tensor | None = None
    ref_logp: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    turn_rewards: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.text.lengths.numel()

    def with_rewards(self, rewards: torch.Tensor) -> "Part":
        """The same samples with rewards [N] float32."""
        if tuple(rewards.shape) != (len(self),):
            raise ValueError(f"rewards: found shape {tuple(rewards.shape)}, expected ({len(self)},)")
        return replace(self, rewards=rewards.float())

    def compute_advantages(
        self, normalize: algorithms.NormConfig | bool = False, scope: Literal["group", "batch"] = "group"
    ) -> "Part":
        """The same samples with one advantage per sample, spread over its generated tokens.

        The reward minus its mean over `scope` (the group of `group_ids`, or the batch), with `normalize=True` divided
        by its std there. A `NormConfig`, or a dict of its keys, says both levels itself, and `scope` is not read.
        A reward that is not finite gives 0 and enters no statistic.
        """
        if self.rewards is None:
            raise ValueError("Part.compute_advantages: rewards are not there yet; grade the samples first")
        if isinstance(normalize, bool):
            if scope not in ("group", "batch"):
                raise ValueError(f"scope: found {scope!r}, expected 'group' or 'batch'")
            normalize = algorithms.NormConfig(mean_level=scope, std_level=scope if normalize else None)
        values = algorithms.normalize(self.rewards, self.text.group_ids, normalize)
        return replace(self, advantages=values[self.text.token_sample_index] * self.text.loss_mask)

    def select(self, samples: torch.Tensor, lengths: torch.Tensor | None = None) -> "Part":
        """The samples at the positions `samples` [M] int64, in that order, repeats allowed; with `lengths` [M] int64,
        the first so many tokens of each.
        """
        tokens = self.text.token_positions(samples, lengths)
        by_token = {name: getattr(self, name) for name in _BY_TOKEN}
        return Part(
            text=self.text.select(samples, lengths),
            records=tuple(self.records[i] for i in samples.tolist()),
            rewards=None if self.rewards is None else self.rewards[samples],
            **{name: value if value is None else value[tokens] for name, value in by_token.items()},
        )

    def masked(self, kept: torch.Tensor) -> "Part":
        """The same samples with every generated token outside `kept` [T] bool made a token of the context."""
        kept = kept & self.text.loss_mask
        text = replace(
            self.text,
            log_probs=self.text.log_probs.where(kept, 0.0),
            loss_mask=kept,
            turn_ids=self.text.turn_ids.where(kept, -1),
            weight_versions=self.text.weight_versions.where(kept, -1),
            support=None if self.text.support is None else self.text.support.where(kept[:, None], -1),
        )
        by_token = {name: getattr(self, name) for name in _BY_TOKEN}
        by_token = {name: value if value is None else value.where(kept, 0.0) for name, value in by_token.items()}
        return replace(self, text=text, **by_token)

    @staticmethod
    def concat(parts: Sequence["Part"]) -> "Part":
        """One part of all samples, in order. Rewards and estimates must be there in all parts or in none."""

        def joined(name: str) -> torch.Tensor | None:
            values = [getattr(part, name) for part in parts]
            if any(value is None for value in values):
                if any(value is not None for value in values):
                    raise ValueError(f"Part.concat: {name} is there in some parts and not in others")
                return None
            return torch.cat(values)

        return Part(
            text=TextSegment.concat([part.text for part in parts]),
            records=tuple(record for part in parts for record in part.records),
            **{name: joined(name) for name in ("rewards", *_BY_TOKEN)},
        )


def _joined_support(segments: Sequence[TextSegment]) -> torch.Tensor | None:
    """Of supports [T_i, K_i] one [T, K], as wide as the widest; a segment without a generated token needs none."""
    missing = [segment for segment in segments if segment.support is None]
    if len(missing) == len(segments):
        return None
    if any(segment.loss_mask.any() for segment in missing):
        raise ValueError("TextSegment.concat: support is there in some segments and not in others")
    width = max(segment.support.shape[1] for segment in segments if segment.support is not None)
    joined = [segment.tokens.new_full((segment.tokens.numel(), width), -1, dtype=torch.int32) for segment in segments]
    for rows, segment in zip(joined, segments, strict=True):
        if segment.support is not None:
            rows[:, : segment.support.shape[1]] = segment.support
    return torch.cat(joined)
