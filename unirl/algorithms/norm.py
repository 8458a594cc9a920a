"""Normalisation of one value per sample over its group or the batch."""

from collections.abc import Mapping
from typing import Any

import torch

from unirl.algorithms.config import NormConfig
from unirl.algorithms.validation import as_config, key_problems


def normalize(
    values: torch.Tensor, group_ids: torch.Tensor | None, config: NormConfig | Mapping[str, Any]
) -> torch.Tensor:
    """values [N], group_ids [N] integer (any order, groups of any size) -> [N], dtype of `values`.

    Result = (value - mean) / (std + eps), each of mean and std over the level that `config` names, or left out.

    - A value that is not finite gives 0 and enters no statistic.
    - `mean_leave1out` leaves the value itself out of its mean; alone in its level the mean is the value itself.
    - Where a std level is named, a level with fewer than two finite values gives 0.
    - The std is taken around the plain mean of its level.

    Computed in float64. Equal values give exactly 0 where a mean level is named.
    Without `group_ids` a group is `config.group_size` values in a row.
    Raises ValueError on shapes that do not fit, a config that breaks its rules, or groups that cannot be told.
    """
    config = as_config(NormConfig, config)
    if problems := key_problems(config):
        raise ValueError(f"NormConfig: {'; '.join(problems)}")
    finite = values.isfinite()
    exact = torch.where(finite, values, 0).double()
    levels = _levels(values, group_ids, config)
    result = exact
    if config.mean_level is not None:
        result = _centred(exact, finite, levels[config.mean_level], config.mean_leave1out)
    if config.std_level is not None:
        std, count = _std(exact, finite, levels[config.std_level], config.std_unbiased)
        result = torch.where(count >= 2, result / (std + config.eps), 0)
    return torch.where(finite, result, 0).to(values.dtype)


def _levels(values: torch.Tensor, group_ids: torch.Tensor | None, config: NormConfig) -> dict[str, torch.Tensor]:
    """For each level in use, index [N] of the set of values that a value is judged with."""
    if values.dim() != 1 or not values.is_floating_point():
        raise ValueError(f"normalize: values: found {values.dtype} {tuple(values.shape)}, expected floats [N]")
    levels = {"batch": torch.zeros_like(values, dtype=torch.long)}
    if "group" in (config.mean_level, config.std_level):
        levels["group"] = torch.unique(_group_ids(values, group_ids, config), return_inverse=True)[1]
    return levels


def _group_ids(values: torch.Tensor, group_ids: torch.Tensor | None, config: NormConfig) -> torch.Tensor:
    if group_ids is not None:
        if group_ids.shape != values.shape or group_ids.is_floating_point():
            raise ValueError(
                f"normalize: group_ids: found {group_ids.dtype} {tuple(group_ids.shape)}, "
                f"expected integers {tuple(values.shape)}"
            )
        return group_ids
    if config.group_size is None:
        raise ValueError("normalize: a group level needs group_ids, or group_size for values that carry none")
    if values.numel() % config.group_size:
        raise ValueError(
            f"normalize: {values.numel()} values do not divide into groups of group_size={config.group_size}; "
            "pass group_ids"
        )
    return torch.arange(values.numel(), device=values.device) // config.group_size


def _sum(values: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """values [N] -> [N]: the sum over the level of each value."""
    return values.new_zeros(values.numel()).index_add_(0, level, values)[level]


def _shifted(values: torch.Tensor, finite: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """Values minus the least of their level: equal values become exact zeros, so that no rounding is left of them."""
    least = values.new_full((values.numel(),), torch.inf)
    least = least.scatter_reduce(0, level, torch.where(finite, values, torch.inf), "amin")[level]
    return torch.where(finite, values - least, 0)


def _centred(values: torch.Tensor, finite: torch.Tensor, level: torch.Tensor, leave1out: bool) -> torch.Tensor:
    shifted = _shifted(values, finite, level)
    total, count = _sum(shifted, level), _sum(finite.double(), level)
    if not leave1out:
        return shifted - total / count.clamp(min=1)
    return torch.where(count >= 2, shifted - (total - shifted) / (count - 1).clamp(min=1), 0)


def _std(
    values: torch.Tensor, finite: torch.Tensor, level: torch.Tensor, unbiased: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Std [N] and count [N] of the finite values in the level of each value."""
    centred = torch.where(finite, _centred(values, finite, level, leave1out=False), 0)
    count = _sum(finite.double(), level)
    return (_sum(centred.square(), level) / (count - int(unbiased)).clamp(min=1)).sqrt(), count
