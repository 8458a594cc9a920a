"""Advantages of single tokens: GAE over the samples of a part."""

import torch

from unirl import algorithms
from unirl.errors import UserError
from unirl.types import Part, SampleStatus


def check_gae(config: algorithms.GAEConfig) -> None:
    """Raises UserError where a lambda given by name cannot be had or gives no number from 0 to 1."""
    one = torch.ones(1)
    try:
        algorithms.gae(
            config,
            task_rewards=one,
            kl_rewards=one,
            values=one,
            loss_mask=one.bool(),
            turn_ids=torch.zeros(1, dtype=torch.long),
            cu_seqlens=torch.tensor([0, 1]),
            truncated=torch.tensor([False]),
        )
    except ValueError as error:
        raise UserError(f"algorithm.gae: {error}") from error


def token_advantages(
    part: Part, rewards: torch.Tensor, kl_rewards: torch.Tensor, config: algorithms.GAEConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """rewards [N], kl_rewards [T] -> advantages [T], returns [T] by GAE over the generated tokens of each sample.

    The reward of a turn is paid with the last token of that turn; where a part has none by turn, a sample's `rewards`
    are paid with its last generated token. A sample that was cut off, truncated or aborted, bootstraps from its last
    value. Without `part.values` every value is 0. A sample whose reward is not finite has advantages and returns that
    are not: it is left out of training.
    """
    text = part.text
    return algorithms.gae(
        config,
        task_rewards=_task_rewards(part, rewards),
        kl_rewards=kl_rewards,
        values=torch.zeros_like(text.log_probs) if part.values is None else part.values,
        loss_mask=text.loss_mask,
        turn_ids=text.turn_ids,
        cu_seqlens=text.cu_seqlens,
        truncated=text.status != SampleStatus.COMPLETED,
    )


def normalize_tokens(part: Part, advantages: torch.Tensor, config: algorithms.NormConfig) -> torch.Tensor:
    """advantages [T] -> [T], normalised over the generated tokens of the batch, or of the group of their sample.

    Each token counts once, so that longer samples weigh more. What is not finite gives 0 and enters no statistic.
    """
    mask = part.text.loss_mask
    group_ids = part.text.group_ids[part.text.token_sample_index]
    normalized = torch.zeros_like(advantages)
    normalized[mask] = algorithms.normalize(advantages[mask], group_ids[mask], config)
    return normalized


def _task_rewards(part: Part, rewards: torch.Tensor) -> torch.Tensor:
    """rewards [N] -> [T]; a sample without a verdict has none on any token."""
    if part.turn_rewards is None:
        return _at_last_generated_token(part, rewards)
    by_token = rewards[part.text.token_sample_index]
    return torch.where(by_token.isfinite(), part.turn_rewards, by_token)


def _at_last_generated_token(part: Part, rewards: torch.Tensor) -> torch.Tensor:
    """rewards [N] -> [T]: 0 but at the last generated token of each sample; a sample without one is left out."""
    generated = part.text.loss_mask.nonzero().flatten()
    sample = part.text.token_sample_index[generated]
    is_last = torch.ones_like(sample, dtype=torch.bool)
    is_last[:-1] = sample[1:] != sample[:-1]
    by_token = torch.zeros_like(part.text.log_probs)
    by_token[generated[is_last]] = rewards[sample[is_last]]
    return by_token
