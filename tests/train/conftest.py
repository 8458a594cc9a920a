from dataclasses import replace

import pytest
import torch

from unirl.types import Part, TextSegment


def make_part(
    groups: list[tuple[list[int], list[list[int]]]], *, rewards: list[float] | None = None, seed: int = 0
) -> Part:
    """A part from groups of (prompt ids, response ids of each sample), with random rollout log-probs."""
    generator = torch.Generator().manual_seed(seed)
    tokens, mask, lengths, group_ids = [], [], [], []
    for group, (prompt, responses) in enumerate(groups):
        for response in responses:
            tokens += prompt + response
            mask += [False] * len(prompt) + [True] * len(response)
            lengths.append(len(prompt) + len(response))
            group_ids.append(group)
    mask = torch.tensor(mask, dtype=torch.bool)
    num_samples = len(lengths)
    part = Part(
        text=TextSegment(
            tokens=torch.tensor(tokens, dtype=torch.int64),
            log_probs=-torch.rand(len(tokens), generator=generator) * mask,
            loss_mask=mask,
            turn_ids=torch.where(mask, 0, -1),
            weight_versions=torch.where(mask, 0, -1),
            lengths=torch.tensor(lengths),
            sample_ids=torch.arange(num_samples) + 100,
            group_ids=torch.tensor(group_ids),
            episode_ids=torch.arange(num_samples),
            status=torch.zeros(num_samples, dtype=torch.int64),
        ),
        records=tuple({} for _ in range(num_samples)),
    )
    if rewards is None:
        rewards = torch.rand(num_samples, generator=generator).tolist()
    return part.with_rewards(torch.tensor(rewards)).compute_advantages()


def with_support(part: Part, vocab: int, top_k: int = 5) -> Part:
    """The part as if each token had been drawn from itself and `top_k` - 1 others, fewer for odd ids."""
    text, generator = part.text, torch.Generator().manual_seed(0)
    likelihood = torch.rand(text.tokens.numel(), vocab, generator=generator).scatter_(1, text.tokens[:, None], 1.0)
    support = likelihood.topk(top_k, 1).indices.int()
    support[text.tokens % 2 == 1, top_k // 2 :] = -1
    return replace(part, text=replace(text, support=support.where(text.loss_mask[:, None], -1)))


@pytest.fixture
def part_of():
    return make_part
