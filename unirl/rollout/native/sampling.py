"""Drawing tokens: one uniform number per token, from a stream that belongs to the sample alone."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from unirl.types import SamplingParams


class UniformStreams:
    """One stream of uniform numbers in [0, 1) per row: numpy's Philox, seeded by the row's seed.

    The n-th number of a row decides its n-th token, whatever else is decoded beside it.
    """

    _BLOCK = 64

    def __init__(self, seeds: Sequence[int], device: torch.device):
        """seeds: B integers that are not negative."""
        self._generators = [np.random.Generator(np.random.Philox(seed)) for seed in seeds]
        self._device = device
        self._block = torch.empty(0, len(seeds), dtype=torch.float64, device=device)
        self._next = 0

    def next(self) -> torch.Tensor:
        """[B] float64: the next number of each row."""
        if self._next == len(self._block):
            block = np.stack([generator.random(self._BLOCK) for generator in self._generators], axis=1)
            self._block = torch.from_numpy(block).to(self._device)
            self._next = 0
        self._next += 1
        return self._block[self._next - 1]

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows but `rows` [M] int64."""
        self._generators = [self._generators[row] for row in rows.tolist()]
        self._block = self._block[:, rows]


class Drawn(NamedTuple):
    """tokens [B] int64 and their log-probs [B] float32 in nats; support [B, top_k] int32: the tokens that each was
    drawn from, filled up with -1, or None where nobody asked for it.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    support: torch.Tensor | None


def draw(logits: torch.Tensor, uniforms: torch.Tensor, params: SamplingParams) -> Drawn:
    """One token from each row of logits [B, V]; uniforms [B] float64.

    The log-probs are of `logits / temperature` (the plain logits at temperature 0, where the likeliest token is taken).
    They are renormalised over the tokens that top_p and top_k leave where `params.return_support` asks for these, and
    not otherwise. A token of probability 0 is never drawn and is in no support.

    Raises FloatingPointError on a row with a NaN or +inf, or with nothing but -inf.
    """
    logits = logits.float()
    if params.temperature not in (0.0, 1.0):
        logits = logits / params.temperature
    probs = torch.softmax(logits, -1)
    # Softmax spreads a NaN or an infinity over its whole row, so one column tells.
    if not probs[:, 0].isfinite().all():
        raise FloatingPointError("the model gave logits that are NaN or infinite: its weights are broken")
    sums = probs.cumsum(-1, dtype=torch.float64)
    support = None
    if params.temperature == 0.0:
        tokens = probs.argmax(-1, keepdim=True)
    elif params.top_p >= 1.0 and params.top_k <= 0:
        tokens = _invert(sums, uniforms)
    else:
        kept, likeliest = _restrict(probs, params.top_p, params.top_k)
        kept_sums = kept.cumsum(-1, dtype=torch.float64)
        tokens = _invert(kept_sums, uniforms)
        if params.return_support:
            sums, support = kept_sums, likeliest.where(kept.gather(1, likeliest) > 0, -1).int()
    # Divided by their sum once more: over a large vocabulary softmax is off by 1e-5, for its sum is of float32.
    log_probs = (probs.gather(1, tokens) / sums[:, -1:]).log()
    return Drawn(tokens[:, 0], log_probs[:, 0].float(), support)


def _invert(sums: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Running sums [B, V] of weights, uniforms [B] -> [B, 1]: first token whose running sum exceeds uniform * total."""
    total = sums[:, -1:].contiguous()
    # Below the total even where the product rounds up to it: the first token that exceeds the threshold then exists,
    # and raises the sum, so its weight is not 0.
    threshold = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, threshold, right=True)


def _restrict(probs: torch.Tensor, top_p: float, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """probs [B, V] with 0 outside the `top_k` likeliest tokens and outside the smallest set that reaches `top_p`; and
    these `top_k` tokens [B, top_k], likeliest first.
    """
    count = probs.shape[-1] if top_k <= 0 else min(top_k, probs.shape[-1])
    likeliest, tokens = probs.topk(count, -1)
    before = likeliest.cumsum(-1, dtype=torch.float64) - likeliest
    return torch.zeros_like(probs).scatter_(1, tokens, likeliest.masked_fill(before >= top_p, 0.0)), tokens
