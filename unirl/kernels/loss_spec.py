"""Which policy loss a fused kernel computes, as plain numbers; and what no fused kernel can compute."""

import math
from dataclasses import dataclass
from typing import Protocol

LOSSES = ("ppo", "drpo", "spo", "dppo", "sapo", "cispo")
"""In the order of LossKind in csrc/common/policy_loss.h."""


class LossConfig(Protocol):
    """The keys of `unirl.algorithms.PolicyLossConfig` that matter here; any object that has them will do."""

    loss: str
    eps_clip: float
    eps_clip_higher: float | None
    c_clip: float | None
    drpo_epsilon: float
    spo_epsilon: float
    dppo_delta: float
    sapo_tau_pos: float
    sapo_tau_neg: float
    importance_sampling_level: str
    kl_coef: float


@dataclass(frozen=True)
class LossSpec:
    """A policy loss and its constants, of which each loss reads its own.

    loss: one of LOSSES.
    lowest, highest: ends of the ratio clip (ppo, cispo).
    cap: dual clip, the loss of a token is at most cap |A| (ppo); infinity: none.
    epsilon: drpo_epsilon, spo_epsilon or dppo_delta.
    tau_pos, tau_neg: temperatures of the gate where A > 0, and elsewhere (sapo).
    """

    loss: str
    lowest: float = 0.0
    highest: float = math.inf
    cap: float = math.inf
    epsilon: float = math.inf
    tau_pos: float = 1.0
    tau_neg: float = 1.0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"loss: found {self.loss!r}, expected one of {', '.join(LOSSES)}")
        if not self.lowest <= self.highest:
            raise ValueError(f"ratio clip: found {self.lowest} to {self.highest}, expected a range")
        for name in ("cap", "epsilon", "tau_pos", "tau_neg"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: found {getattr(self, name)}, expected a number > 0")

    @classmethod
    def of(cls, config: "LossSpec | LossConfig") -> "LossSpec":
        """The loss of a config. Raises ValueError where `fused_loss_refusal` has a reason."""
        if isinstance(config, LossSpec):
            return config
        if reason := fused_loss_refusal(config):
            raise ValueError(f"fused_policy_loss: {reason}; use token_logprob and policy_loss for it")
        clip = {"lowest": 1 - config.eps_clip, "highest": 1 + (config.eps_clip_higher or config.eps_clip)}
        constants = {
            "ppo": clip | {"cap": math.inf if config.c_clip is None else config.c_clip},
            "drpo": {"epsilon": config.drpo_epsilon},
            "spo": {"epsilon": config.spo_epsilon},
            "dppo": {"epsilon": config.dppo_delta},
            "sapo": {"tau_pos": config.sapo_tau_pos, "tau_neg": config.sapo_tau_neg},
            "cispo": clip,
        }
        return cls(config.loss, **constants.get(config.loss, {}))

    @property
    def kind(self) -> int:
        """LossKind of the C++ code."""
        return LOSSES.index(self.loss)

    @property
    def constants(self) -> list[float]:
        """In the order of the C++ code."""
        return [self.lowest, self.highest, self.cap, self.epsilon, self.tau_pos, self.tau_neg]


def fused_loss_refusal(config: LossConfig) -> str | None:
    """Why `fused_policy_loss` cannot compute the loss of `config`; None where it can."""
    if config.importance_sampling_level != "token":
        return (
            f"importance_sampling_level={config.importance_sampling_level}: the gradient of a token then depends on "
            "the log-probs of its whole sequence, which are not known while its row is at hand"
        )
    if config.kl_coef > 0:
        return f"kl_coef={config.kl_coef}: the KL to the reference policy has no part in the fused loss"
    return None
