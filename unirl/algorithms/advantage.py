"""Generalised advantage estimation over tokens or turns of packed sequences."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from numbers import Real
from typing import Any

import torch

from unirl.algorithms.config import GAEConfig, gae_config_problems
from unirl.algorithms.packed import Packing
from unirl.algorithms.validation import as_config


@torch.no_grad()
def gae(
    config: GAEConfig | Mapping[str, Any],
    *,
    task_rewards: torch.Tensor,
    kl_rewards: torch.Tensor,
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    truncated: torch.Tensor,
    turn_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages [T] and returns [T] (targets of the values) of N packed sequences; 0 where masked.

    task_rewards, kl_rewards, values [T] float; read at unmasked tokens only, so a masked token costs no step.
    loss_mask [T] bool. turn_ids [T] integer, of the turn within its sequence, not decreasing; read for unit turn only.
    cu_seqlens [N+1]. truncated [N] bool: such a sequence bootstraps from its last value, any other from 0; with
    `bootstrap_truncated` false all do from 0.

    A_t = delta_t + discount * lambda * A_{t+1}, delta_t = r_t + discount * V_{t+1} - V_t, return = A_t + V_t
    (arXiv 1506.02438, eq. 16). Unit token: r = task + KL reward. Unit turn: a step is a turn, r the sum of its task
    rewards, V taken at its first token; each token gets the advantage of its turn plus its own KL reward, which enters
    no return.
    Raises ValueError on a config that breaks its rules, shapes that do not fit, or turn ids that cannot be.
    """
    config = as_config(GAEConfig, config)
    if problems := gae_config_problems(config):
        raise ValueError(f"gae: {'; '.join(problems)}")
    mask = loss_mask.bool()
    packing = Packing.from_cu_seqlens(cu_seqlens, mask.numel())
    by_token = {"task_rewards": task_rewards, "kl_rewards": kl_rewards, "values": values}
    _check_shapes({**by_token, "loss_mask": mask}, mask.numel(), truncated, packing.num_sequences)
    tokens = mask.nonzero().flatten()
    task_rewards, kl_rewards, values = (tensor[tokens] for tensor in by_token.values())
    if config.gae_timestep_unit == "turn":
        _check_turn_ids(turn_ids, mask, packing)
        steps = _Steps.turns(packing.index[tokens], turn_ids[tokens])
        step_rewards = task_rewards.new_zeros(steps.sequence.numel()).index_add(0, steps.of_token, task_rewards)
    else:
        steps = _Steps.tokens(packing.index[tokens])
        step_rewards = task_rewards + kl_rewards
    step_values = values[steps.first_token]
    step_advantages = _advantages(
        config, step_rewards, step_values, steps, truncated.bool() & config.bootstrap_truncated
    )
    advantages = step_advantages[steps.of_token]
    if config.gae_timestep_unit == "turn":
        advantages = advantages + kl_rewards
    returns = (step_advantages + step_values)[steps.of_token]
    return _scatter(advantages, tokens, mask.numel()), _scatter(returns, tokens, mask.numel())


@dataclass(frozen=True)
class _Steps:
    """S steps of U unmasked tokens. sequence, first_token [S]; of_token [U]; last [S] bool: last of its sequence."""

    sequence: torch.Tensor
    first_token: torch.Tensor
    of_token: torch.Tensor
    last: torch.Tensor

    @staticmethod
    def tokens(sequence: torch.Tensor) -> "_Steps":
        return _Steps._from_starts(sequence, torch.ones_like(sequence, dtype=torch.bool))

    @staticmethod
    def turns(sequence: torch.Tensor, turn_ids: torch.Tensor) -> "_Steps":
        starts = torch.ones_like(sequence, dtype=torch.bool)
        starts[1:] = (sequence[1:] != sequence[:-1]) | (turn_ids[1:] != turn_ids[:-1])
        return _Steps._from_starts(sequence, starts)

    @staticmethod
    def _from_starts(sequence: torch.Tensor, starts: torch.Tensor) -> "_Steps":
        """sequence [U]: of each unmasked token. starts [U] bool: it begins a step."""
        first_token = starts.nonzero().flatten()
        step_sequence = sequence[first_token]
        last = torch.ones_like(step_sequence, dtype=torch.bool)
        last[:-1] = step_sequence[1:] != step_sequence[:-1]
        return _Steps(step_sequence, first_token, starts.long().cumsum(0) - 1, last)


def _advantages(
    config: GAEConfig, rewards: torch.Tensor, values: torch.Tensor, steps: _Steps, truncated: torch.Tensor
) -> torch.Tensor:
    """rewards, values [S] -> advantages [S]."""
    following = torch.where(truncated[steps.sequence], values, 0)
    following[:-1] = torch.where(steps.last[:-1], following[:-1], values[1:])
    deltas = rewards + config.discount * following - values
    counts = torch.bincount(steps.sequence, minlength=truncated.numel())
    decay = config.discount * _lambdas(config, counts).to(deltas)[steps.sequence]
    return _reverse_scan(deltas, torch.where(steps.last, 0, decay), int(counts.max()) if counts.numel() else 0)


def _reverse_scan(x: torch.Tensor, decay: torch.Tensor, longest: int) -> torch.Tensor:
    """y [S] with y_t = x_t + decay_t * y_{t+1}, by doubling: after k rounds y_t holds the terms of 2^k steps.

    decay is 0 at the last step of a sequence; what follows it is left out by choice, not by a product with 0, so that
    a value that is not finite stays in its sequence.
    """
    x, decay, reach = x.clone(), decay.clone(), 1
    while reach < longest:
        carry, weight = x[reach:].clone(), decay[:-reach]
        x[:-reach] += torch.where(weight != 0, weight * carry, 0)
        decay[:-reach] = weight * decay[reach:].clone()
        reach *= 2
    return x


def _scatter(values: torch.Tensor, tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return values.new_zeros(num_tokens).index_copy(0, tokens, values)


def _vapo_length_adaptive(num_steps: int, alpha: float) -> float:
    """max(0, 1 - 1 / (alpha L)) (VAPO, arXiv 2504.05118, eq. 9)."""
    return max(0.0, 1 - 1 / (alpha * num_steps)) if num_steps else 0.0


def _relative_position(num_steps: int, q: float) -> float:
    """q^(1 / (L - 1)): what the first step sees of the last one is weighted by q at every length."""
    if num_steps < 2:
        return float(num_steps)
    return q ** (1 / (num_steps - 1))


_BUILT_IN_LAMBDAS = {"vapo_length_adaptive": _vapo_length_adaptive, "relative_position": _relative_position}


def _lambdas(config: GAEConfig, counts: torch.Tensor) -> torch.Tensor:
    """counts [N] steps of each sequence -> lambda [N] float64."""
    lengths, inverse = torch.unique(counts, return_inverse=True)
    if isinstance(config.gae_lambda, str):
        function = _lambda_function(config.gae_lambda)
        found = [function(length, **config.gae_lambda_kwargs) for length in lengths.tolist()]
    else:
        found = [config.gae_lambda] * lengths.numel()
    if bad := [value for value in found if not (isinstance(value, Real) and 0 <= value <= 1)]:
        raise ValueError(f"gae_lambda: {config.gae_lambda} gives {bad[0]!r}, expected a number from 0 to 1")
    return torch.tensor(found, dtype=torch.float64, device=counts.device)[inverse]


def _lambda_function(name: str) -> Callable[..., float]:
    if name in _BUILT_IN_LAMBDAS:
        return _BUILT_IN_LAMBDAS[name]
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"gae_lambda: {name} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"gae_lambda: {name} is {found!r}, expected a callable(num_steps, **gae_lambda_kwargs)")
    return found


def _check_shapes(by_token: dict[str, torch.Tensor], num_tokens: int, truncated: torch.Tensor, num: int) -> None:
    for name, tensor in by_token.items():
        if tuple(tensor.shape) != (num_tokens,):
            raise ValueError(f"gae: {name}: found shape {tuple(tensor.shape)}, expected [T] = ({num_tokens},)")
    if tuple(truncated.shape) != (num,):
        raise ValueError(f"gae: truncated: found shape {tuple(truncated.shape)}, expected [N] = ({num},)")


def _check_turn_ids(turn_ids: torch.Tensor | None, mask: torch.Tensor, packing: Packing) -> None:
    if turn_ids is None:
        raise ValueError("gae: turn_ids are missing, and gae_timestep_unit=turn needs them")
    if turn_ids.shape != mask.shape or turn_ids.is_floating_point() or turn_ids.dtype == torch.bool:
        raise ValueError(
            f"gae: turn_ids: found {turn_ids.dtype} {tuple(turn_ids.shape)}, expected integers {tuple(mask.shape)}"
        )
    ids, sequence = turn_ids[mask], packing.index[mask]
    lengths = packing.count(torch.ones_like(mask))[sequence]
    outside = (ids < 0) | (ids >= lengths)
    if bool(outside.any()):
        at = int(outside.nonzero()[0])
        raise ValueError(
            f"gae: turn_ids: found {int(ids[at])} in a sequence of {int(lengths[at])} tokens, "
            "expected 0 or more, and less than its tokens"
        )
    falling = (sequence[1:] == sequence[:-1]) & (ids[1:] < ids[:-1])
    if bool(falling.any()):
        at = int(falling.nonzero()[0])
        raise ValueError(
            f"gae: turn_ids: found {int(ids[at + 1])} after {int(ids[at])} in one sequence, expected no decrease"
        )
