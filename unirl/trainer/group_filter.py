"""Group filters: which groups are worth training on, by the name that `algorithm.dynamic_filter` takes."""

from collections.abc import Callable

import numpy as np
import torch

from unirl.algorithms import rewards_differ
from unirl.errors import UserError
from unirl.types import Part
from unirl.utils.dotted import load_callable

GroupFilter = Callable[[Part], bool]
"""Judges the samples of one group, graded and with shaped rewards: True keeps them, False rejects them."""


def nonzero_variance(group: Part) -> bool:
    """Reject a group whose finite rewards are all equal, or fewer than two."""
    return rewards_differ(group.rewards)


BUILT_IN = {"nonzero_variance": nonzero_variance}


def load_group_filter(name: str | None) -> GroupFilter | None:
    """The filter of `algorithm.dynamic_filter`: None, a built-in name or a dotted path.

    Raises UserError where the path leads to nothing callable. A filter from a dotted path answers with a bool, which
    may be one of numpy or a tensor of one; another answer is a UserError when it comes.
    """
    if name is None or name in BUILT_IN:
        return BUILT_IN.get(name)
    judge = load_callable("algorithm.dynamic_filter", name, "(group: Part) -> bool")

    def checked(group: Part) -> bool:
        verdict = judge(group)
        if isinstance(verdict, np.bool_) or (isinstance(verdict, torch.Tensor) and verdict.numel() == 1):
            verdict = verdict.item()
        if not isinstance(verdict, bool):
            raise UserError(
                f"algorithm.dynamic_filter={name}: found the answer {verdict!r} on a group, expected True (keep) or "
                "False (reject)"
            )
        return verdict

    return checked
