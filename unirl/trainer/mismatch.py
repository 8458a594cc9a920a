"""How far the policy under training is from the one that drew the samples, though both hold the same weights."""

import math
from dataclasses import dataclass

import torch

from unirl.config.schema import DebugConfig
from unirl.types import Part

_FAR = math.log(10.0)
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Mismatch:
    """Log-prob differences replay - rollout of the tokens that were replayed.

    differences [M] float32, sample_index [M] int64: position in the part of the sample that each token is of.
    """

    differences: torch.Tensor
    sample_index: torch.Tensor

    @staticmethod
    def of(part: Part, replay_logp: torch.Tensor) -> "Mismatch":
        """replay_logp [T]: log-probs of the actor before its first step on `part`, NaN where it was not asked."""
        text = part.text
        known = text.loss_mask & text.log_probs.isfinite() & replay_logp.isfinite()
        return Mismatch((replay_logp - text.log_probs)[known], text.token_sample_index[known])

    def metrics(self) -> dict[str, float]:
        """Of the tokens that were replayed; nothing where there are none.

        With r = replay / rollout probability, the KLs are means over the rollout's own tokens of estimators that are
        never negative: KL(rollout || replay) of r - 1 - log r, KL(replay || rollout) of r log r - (r - 1).
        """
        if not self.differences.numel():
            return {}
        distance = self.differences.double().abs()
        log_ratio = self.differences.double().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        excess, ratio = torch.expm1(log_ratio), log_ratio.exp()
        return {
            "rollout_replay_logp_absdiff_mean": distance.mean().item(),
            "rollout_replay_logp_absdiff_p99": _quantile(distance, 0.99),
            "rollout_replay_logp_absdiff_max": distance.max().item(),
            "rollout_replay_kl": (excess - log_ratio).mean().item(),
            "replay_rollout_kl": (ratio * log_ratio - excess).mean().item(),
            "rollout_replay_beyond_10x": (distance > _FAR).double().mean().item(),
        }

    def worst(self, count: int) -> list[tuple[int, float, float]]:
        """(position in the part, mean, maximum of the absolute differences) of the samples with the largest means."""
        samples, index = torch.unique(self.sample_index, return_inverse=True)
        distance = self.differences.abs()
        sums = torch.zeros(len(samples)).index_add_(0, index, distance)
        means = sums / torch.bincount(index, minlength=len(samples))
        largest = torch.zeros(len(samples)).scatter_reduce_(0, index, distance, "amax")
        order = means.argsort(descending=True)[:count]
        return list(zip(samples[order].tolist(), means[order].tolist(), largest[order].tolist(), strict=True))


def _quantile(values: torch.Tensor, share: float) -> float:
    """The smallest value that `share` of all do not exceed; torch.quantile takes no more than 16 million."""
    return values.kthvalue(math.ceil(share * values.numel())).values.item()


def alarm(metrics: dict[str, float], config: DebugConfig) -> str | None:
    """What to say where the mean difference is beyond `debug.mismatch_limit`."""
    found, limit = metrics.get("rollout_replay_logp_absdiff_mean"), config.mismatch_limit
    if found is None or limit is None or found <= limit:
        return None
    return (
        f"rollout_replay_logp_absdiff_mean is {found:.3g}, beyond debug.mismatch_limit={limit:g}: the rollout engine "
        "and the actor disagree on the log-probs of the same tokens; see docs/mismatch.md"
    )
