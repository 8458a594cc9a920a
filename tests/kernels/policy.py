"""Inputs of the fused policy loss, and its oracle: dense float64 log-probs and unirl.algorithms under autograd."""

from typing import NamedTuple

import torch
from torch import Tensor

from unirl.algorithms import PolicyLossConfig
from unirl.algorithms.packed import Packing
from unirl.algorithms.ratio import ratio_terms
from unirl.algorithms.registry import algorithm_class

CONFIGS = {
    "ppo": PolicyLossConfig(loss="ppo", eps_clip=0.2),
    "ppo-asymmetric": PolicyLossConfig(loss="ppo", eps_clip=0.2, eps_clip_higher=0.28),
    "ppo-dual-clip": PolicyLossConfig(loss="ppo", eps_clip=0.2, c_clip=1.5),
    "drpo": PolicyLossConfig(loss="drpo", drpo_epsilon=0.2),
    "drpo-paper": PolicyLossConfig(loss="drpo", drpo_epsilon=12.5),
    "spo": PolicyLossConfig(loss="spo", spo_epsilon=0.2),
    "dppo": PolicyLossConfig(loss="dppo", dppo_delta=0.05),
    "sapo": PolicyLossConfig(loss="sapo", sapo_tau_pos=2.0, sapo_tau_neg=4.0),
    "cispo": PolicyLossConfig(loss="cispo", eps_clip=0.3, eps_clip_higher=0.4),
}


class Surrogate(NamedTuple):
    """All [T]: what unirl.algorithms says of each token. derivative: by autograd; closed_form: its own formula."""

    ratio: Tensor
    loss: Tensor
    derivative: Tensor
    closed_form: Tensor
    upper: Tensor
    lower: Tensor


def surrogate(config, logp: Tensor, old_logp: Tensor, anchor_logp: Tensor, advantages: Tensor) -> Surrogate:
    leaf = logp.detach().clone().requires_grad_()
    packing = Packing.from_cu_seqlens(torch.tensor([0, leaf.numel()]), leaf.numel())
    live = torch.ones_like(leaf, dtype=torch.bool)
    terms = ratio_terms(config, leaf, old_logp, anchor_logp, advantages, live, packing)
    token_loss = algorithm_class(config.loss).token_loss
    loss = token_loss.loss(config, terms)
    loss.sum().backward()
    upper, lower = token_loss.limits(config, terms)
    closed_form = token_loss.derivative(config, terms).detach()
    return Surrogate(terms.ratio.detach(), loss.detach(), leaf.grad, closed_form, upper, lower)


def log_probs(rows: int, spread: float = 0.4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp, old_logp, anchor_logp, advantages [rows] float64, with ratios on both sides of every clip."""
    logp = -3 * torch.rand(rows, dtype=torch.float64)
    old_logp = (logp + spread * torch.randn(rows, dtype=torch.float64)).clamp(max=0)
    anchor_logp = (logp + spread * torch.randn(rows, dtype=torch.float64)).clamp(max=0)
    advantages = torch.randn(rows, dtype=torch.float64)
    advantages[::7] = 0
    return logp, old_logp, anchor_logp, advantages


def token_inputs(logp: Tensor) -> dict[str, Tensor]:
    """Arguments of fused_policy_loss for tokens of log-probs near `logp` [T], some of them masked or rejected."""
    rows = logp.numel()
    noise = torch.randn(3, rows)
    return {
        "old_logp": (logp + 0.3 * noise[0]).float(),
        "anchor_logp": (logp + 0.3 * noise[1]).float(),
        "advantages": noise[2],
        "weights": torch.rand(rows) * (torch.rand(rows) > 0.2),
        "entropy_weights": 0.1 * torch.rand(rows),
        "loss_mask": torch.rand(rows) > 0.2,
    }
