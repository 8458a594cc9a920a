"""The rollout batches that an audit trains on: small, uneven, and with all that a batch may hold."""

import math
from dataclasses import dataclass, replace

import torch

from unirl.types import Part, TextSegment

LONGEST = 32
"""Tokens of the longest sample: the least token budget, also where trees are padded to a multiple of 32."""
SHAPES = (
    [(5, (3, 17, 1)), (1, (12,)), (9, (14, 4, 0, 2)), (3, (6, 20)), (20, (8, 12)), (2, (11, 5))],
    [(2, (30, 3)), (11, (2, 5)), (6, (13, 1))],
    [(4, (9, 2)), (3, (7,))],  # so few that replicas and micro-batches are left empty
)
"""Of each batch: (prompt tokens, generated tokens of each sample) by group."""


@dataclass(frozen=True)
class Noise:
    """How far (standard deviation, nats) the rollout policy and the reference policy are from the policy."""

    rollout: float = 0.3
    reference: float = 0.3


ON_POLICY = Noise(rollout=0.0)


def make_parts(vocab: int, noise: Noise | None = None, top_k: int | None = None) -> list[Part]:
    """The batches, for a model of `vocab` token ids; `log_probs` and `ref_logp` are noise, see `ParallelCase`. With
    `top_k` each token was drawn from a support of 1 to so many random tokens.

    The first one has a sample without a generated token, one with an observation between its turns, one without a
    verdict (reward NaN), one that teaches nothing (advantage 0) and a token whose rollout log-prob is not finite.
    """
    parts = [make_part(shapes, vocab, noise, seed) for seed, shapes in enumerate(SHAPES)]
    parts = [_with_oddities(parts[0]), *parts[1:]]
    return parts if top_k is None else [_with_support(part, vocab, top_k) for part in parts]


def make_part(shapes: list[tuple[int, tuple[int, ...]]], vocab: int, noise: Noise | None = None, seed: int = 0) -> Part:
    """One batch, see `SHAPES`: random tokens, rewards and returns, and advantages that differ from sample to sample."""
    noise = noise or Noise()
    generator = torch.Generator().manual_seed(seed)
    tokens, mask, lengths, groups = [], [], [], []
    for group, (prompt, responses) in enumerate(shapes):
        prompt_ids = torch.randint(vocab, (prompt,), generator=generator)
        for response in responses:
            tokens += [prompt_ids, torch.randint(vocab, (response,), generator=generator)]
            mask += [False] * prompt + [True] * response
            lengths.append(prompt + response)
            groups.append(group)
    mask = torch.tensor(mask)
    count = len(lengths)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(mask.numel(), generator=generator) * mask

    text = TextSegment(
        tokens=torch.cat(tokens),
        log_probs=normal(noise.rollout),
        loss_mask=mask,
        turn_ids=torch.where(mask, 0, -1),
        weight_versions=torch.where(mask, 0, -1),
        lengths=torch.tensor(lengths),
        sample_ids=torch.arange(count),
        group_ids=torch.tensor(groups),
        episode_ids=torch.arange(count),
        status=torch.zeros(count, dtype=torch.int64),
    )
    part = Part(text, records=tuple({} for _ in range(count)), ref_logp=normal(noise.reference), returns=normal(0.3))
    return part.with_rewards(torch.rand(count, generator=generator)).compute_advantages(scope="batch")


def _with_oddities(part: Part) -> Part:
    text = part.text
    start = text.cu_seqlens.tolist()
    mask, log_probs, turns = text.loss_mask.clone(), text.log_probs.clone(), text.turn_ids.clone()
    observed = slice(start[1] + 10, start[1] + 15)  # within the sample of 17 generated tokens
    mask[observed], turns[observed], log_probs[observed] = False, -1, 0.0
    turns[start[1] + 15 : start[2]] = 1
    log_probs[start[3] + 6] = math.nan
    rewards, advantages = part.rewards.clone(), part.advantages * mask
    rewards[5] = math.nan
    advantages[start[5] : start[6]] = 0.0
    advantages[start[8] : start[9]] = 0.0
    text = replace(text, loss_mask=mask, log_probs=log_probs, turn_ids=turns)
    masked = {name: getattr(part, name) * mask for name in ("ref_logp", "returns")}
    return replace(part, text=text, rewards=rewards, advantages=advantages, **masked)


def _with_support(part: Part, vocab: int, top_k: int) -> Part:
    text, generator = part.text, torch.Generator().manual_seed(top_k)
    count = text.tokens.numel()
    likelihood = torch.rand(count, vocab, generator=generator)
    likelihood.scatter_(1, text.tokens[:, None], 1.0)  # the token itself comes first
    support = likelihood.topk(top_k, 1).indices.int()
    sizes = torch.randint(1, top_k + 1, (count, 1), generator=generator)
    kept = text.loss_mask[:, None] & (torch.arange(top_k) < sizes)
    return replace(part, text=replace(text, support=support.where(kept, -1)))
