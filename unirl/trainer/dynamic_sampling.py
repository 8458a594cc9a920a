"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): which of the groups drawn in an iteration are trained on,
and how many more prompts are drawn for them.
"""

import math

import torch

from unirl.config.schema import TrainConfig
from unirl.trainer.group_filter import GroupFilter
from unirl.types import Part


class GroupSelection:
    """The rounds of one iteration: ask `next_round` how many prompts to draw, `add` their graded samples, repeat.

    Without a filter there is one round and all is kept. With `algorithm.dynamic_bs` there is one round, of which the
    filter leaves what it leaves. Otherwise rounds go on until `batch_size` groups are kept, at most
    `algorithm.max_sampling_rounds` of them. Kept groups beyond `batch_size` are dropped, the last ones drawn: every
    round is waited for to its end, so that this prefers no group for being short.
    """

    def __init__(self, config: TrainConfig, keep: GroupFilter | None):
        self._batch_size = config.batch_size
        self._max_rounds = config.algorithm.max_sampling_rounds
        self._is_fixed = not config.algorithm.dynamic_bs
        self._keep = keep
        self._parts: list[Part] = []
        self._kept: list[torch.Tensor] = []  # of each group, the positions of its samples in `drawn`
        self.num_groups = 0
        """Groups drawn so far, one for each prompt."""

    @property
    def rounds(self) -> int:
        return len(self._parts)

    @property
    def num_samples(self) -> int:
        """Samples drawn so far."""
        return sum(map(len, self._parts))

    @property
    def num_kept(self) -> int:
        """Groups that the filter has kept so far, surplus ones too."""
        return len(self._kept)

    def next_round(self) -> int:
        """Prompts to draw next, at most `batch_size`; 0 when the iteration has its samples."""
        if not self.rounds:
            return self._batch_size
        missing = self._batch_size - self.num_kept
        if self._keep is None or not self._is_fixed or missing <= 0 or self.rounds == self._max_rounds:
            return 0
        return min(self._batch_size, prompts_for(missing, kept=self.num_kept, drawn=self.num_groups))

    def add(self, part: Part) -> None:
        """The samples of a round, with rewards."""
        first = self.num_samples
        for samples in part.text.group_positions():
            self.num_groups += 1
            if self._keep is None or self._keep(part.select(samples)):
                self._kept.append(first + samples)
        self._parts.append(part)

    def drawn(self) -> Part:
        """All samples of all rounds."""
        return Part.concat(self._parts)

    def trained(self) -> Part:
        """The samples of the groups to train on, in the order drawn; it may be empty."""
        samples = [torch.empty(0, dtype=torch.int64), *self._trained_groups()]
        return self.drawn().select(torch.cat(samples))

    def metrics(self) -> dict[str, float]:
        """What the filter did; nothing without one."""
        if self._keep is None:
            return {}
        return {
            "filtered_fraction": 1 - self.num_kept / self.num_groups,
            "sampling/rounds": self.rounds,
            "sampling/prompts": self.num_groups,
            "sampling/trained_groups": len(self._trained_groups()),
            "sampling/surplus_groups": self.num_kept - len(self._trained_groups()),
        }

    def shortfall(self) -> str | None:
        """What to tell the user where a batch is not full, or, with `dynamic_bs`, empty."""
        if self.num_kept and (not self._is_fixed or self.num_kept >= self._batch_size):
            return None
        outcome = f"training on {self.num_kept} groups" if self.num_kept else "no optimizer step"
        wanted = f" of {self._batch_size}" if self._is_fixed else ""
        limit = f", the most that algorithm.max_sampling_rounds={self._max_rounds} allows" if self._is_fixed else ""
        return (
            f"algorithm.dynamic_filter kept {self.num_kept}{wanted} groups out of {self.num_groups} drawn in "
            f"{self.rounds} {'rounds' if self.rounds > 1 else 'round'}{limit}: {outcome}"
        )

    def _trained_groups(self) -> list[torch.Tensor]:
        return self._kept[: self._batch_size] if self._is_fixed else self._kept


def prompts_for(missing: int, *, kept: int, drawn: int) -> int:
    """Prompts to draw for `missing` more groups, when a filter has kept `kept` of `drawn` so far.

    The least n with n p - sqrt(n p (1 - p)) >= missing: one more round is then enough in about 5 of 6 cases. p is the
    rate of acceptance with one success and one failure added, so that it is neither 0 nor 1.
    """
    rate = (kept + 1) / (drawn + 2)
    spread = math.sqrt(rate * (1 - rate))
    return math.ceil(((spread + math.sqrt(spread**2 + 4 * rate * missing)) / (2 * rate)) ** 2)
