"""What an iteration says of its rollouts: metrics and readable samples."""

from collections.abc import Iterator
from typing import Any

import torch

from unirl.algorithms import rewards_differ
from unirl.types import Part, SampleStatus


def batch_metrics(drawn: Part) -> dict[str, float | None]:
    """Metrics of the samples `drawn` in an iteration, before any group filter; a mean over nothing is None.

    They mean the same whatever the algorithm. Statistics of rewards are over samples with a finite reward.
    `reward/zero_variance_groups` is the share of groups whose finite rewards are all equal: they teach nothing.
    """
    rewards, status = drawn.rewards, drawn.text.status
    finite = torch.isfinite(rewards)
    lengths = drawn.text.response_lengths.float()
    return {
        "reward/mean": _mean(rewards[finite]),
        "reward/zero_variance_groups": _zero_variance_groups(drawn),
        "reward/ungraded": int((~finite).sum()),
        "response/length_mean": _mean(lengths),
        "response/length_max": lengths.max().item(),
        "response/truncated_fraction": _mean((status == SampleStatus.TRUNCATED).float()),
        "response/aborted_fraction": _mean((status == SampleStatus.ABORTED).float()),
        "prompt/length_mean": _mean(drawn.text.prompt_lengths.float()),
        "weight_version": int(drawn.text.weight_versions.max()),
        **_episode_metrics(drawn),
    }


def _episode_metrics(part: Part) -> dict[str, float | None]:
    if part.turn_rewards is None:
        return {}
    turns = part.text.turn_counts.float()
    behind_prompt = (part.text.lengths - part.text.prompt_lengths).float()
    return {
        "episode/turns_mean": _mean(turns),
        "episode/turns_max": turns.max().item(),
        "episode/length_mean": _mean(behind_prompt),
    }


def readable_samples(part: Part, tokenizer, limit: int) -> Iterator[dict[str, Any]]:
    """The first `limit` samples as JSON-ready records, each from another group as far as there are groups."""
    group_ids = part.text.group_ids
    first_of_group = torch.ones_like(group_ids, dtype=torch.bool)
    first_of_group[1:] = group_ids[1:] != group_ids[:-1]
    order = torch.cat([first_of_group.nonzero().flatten(), (~first_of_group).nonzero().flatten()])
    bounds, prompt_lengths = part.text.cu_seqlens.tolist(), part.text.prompt_lengths.tolist()
    for sample in order[:limit].tolist():
        tokens = part.text.tokens[bounds[sample] : bounds[sample + 1]]
        mask = part.text.loss_mask[bounds[sample] : bounds[sample + 1]]
        turns = {} if part.turn_rewards is None else {"turns": _readable_turns(part, sample, tokenizer)}
        yield {
            "sample_id": int(part.text.sample_ids[sample]),
            "group_id": int(group_ids[sample]),
            "data_source": part.records[sample].get("data_source"),
            "prompt": tokenizer.decode(tokens[: prompt_lengths[sample]], skip_special_tokens=False),
            "response": tokenizer.decode(tokens[mask], skip_special_tokens=True),
            **turns,
            "answer": part.records[sample].get("answer"),
            "reward": _number_or_none(part.rewards[sample]),
            "status": SampleStatus(int(part.text.status[sample])).name.lower(),
            "response_length": int(mask.sum()),
        }


def _readable_turns(part: Part, sample: int, tokenizer) -> list[dict[str, Any]]:
    """The turns of an episode: the response, its reward, and the observation that it brought."""
    episode = part.select(torch.tensor([sample]))
    tokens, turn_ids = episode.text.tokens, episode.text.turn_ids
    spans = [(turn_ids == turn).nonzero().flatten().tolist() for turn in range(int(episode.text.turn_counts))]
    following = [*(span[0] for span in spans[1:]), len(tokens)]
    return [
        {
            "response": tokenizer.decode(tokens[span], skip_special_tokens=True),
            "reward": _number_or_none(episode.turn_rewards[span[-1]]),
            "observation": tokenizer.decode(tokens[span[-1] + 1 : end], skip_special_tokens=False),
        }
        for span, end in zip(spans, following, strict=False)
    ]


def _mean(values: torch.Tensor) -> float | None:
    return values.mean().item() if values.numel() else None


def _number_or_none(value: torch.Tensor) -> float | None:
    """JSON has no NaN."""
    return value.item() if torch.isfinite(value) else None


def _zero_variance_groups(part: Part) -> float:
    groups = part.text.group_positions()
    return sum(not rewards_differ(part.rewards[samples]) for samples in groups) / len(groups)
