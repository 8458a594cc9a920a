"""What an iteration says of its rollouts: metrics and readable samples."""

from collections.abc import Iterator
from typing import Any

import torch

from unirl.types import Part, SampleStatus


def batch_metrics(part: Part) -> dict[str, float | None]:
    """Metrics of the batch that is trained on; a mean over nothing is None.

    Statistics of rewards are over samples with a finite reward. `reward/zero_variance_groups` is the share of groups
    whose finite rewards are all equal: they teach nothing.
    """
    rewards, status = part.rewards, part.text.status
    finite = torch.isfinite(rewards)
    lengths = part.text.response_lengths.float()
    return {
        "reward/mean": _mean(rewards[finite]),
        "reward/zero_variance_groups": _zero_variance_groups(part),
        "reward/ungraded": int((~finite).sum()),
        "response/length_mean": _mean(lengths),
        "response/length_max": lengths.max().item(),
        "response/truncated_fraction": _mean((status == SampleStatus.TRUNCATED).float()),
        "response/aborted_fraction": _mean((status == SampleStatus.ABORTED).float()),
        "prompt/length_mean": _mean(part.text.lengths.float() - lengths),
        "weight_version": int(part.text.weight_versions.max()),
    }


def readable_samples(part: Part, tokenizer, limit: int) -> Iterator[dict[str, Any]]:
    """The first `limit` samples as JSON-ready records, each from another group as far as there are groups."""
    group_ids = part.text.group_ids
    first_of_group = torch.ones_like(group_ids, dtype=torch.bool)
    first_of_group[1:] = group_ids[1:] != group_ids[:-1]
    order = torch.cat([first_of_group.nonzero().flatten(), (~first_of_group).nonzero().flatten()])
    bounds = part.text.cu_seqlens.tolist()
    for sample in order[:limit].tolist():
        tokens = part.text.tokens[bounds[sample] : bounds[sample + 1]]
        mask = part.text.loss_mask[bounds[sample] : bounds[sample + 1]]
        yield {
            "sample_id": int(part.text.sample_ids[sample]),
            "group_id": int(group_ids[sample]),
            "data_source": part.records[sample].get("data_source"),
            "prompt": tokenizer.decode(tokens[~mask], skip_special_tokens=False),
            "response": tokenizer.decode(tokens[mask], skip_special_tokens=True),
            "answer": part.records[sample].get("answer"),
            "reward": _number_or_none(part.rewards[sample]),
            "status": SampleStatus(int(part.text.status[sample])).name.lower(),
            "response_length": int(mask.sum()),
        }


def _mean(values: torch.Tensor) -> float | None:
    return values.mean().item() if values.numel() else None


def _number_or_none(value: torch.Tensor) -> float | None:
    """JSON has no NaN."""
    return value.item() if torch.isfinite(value) else None


def _zero_variance_groups(part: Part) -> float:
    finite = torch.isfinite(part.rewards)
    groups, index = torch.unique(part.text.group_ids, return_inverse=True)
    lowest = torch.full((len(groups),), torch.inf).scatter_reduce_(0, index[finite], part.rewards[finite], "amin")
    highest = torch.full((len(groups),), -torch.inf).scatter_reduce_(0, index[finite], part.rewards[finite], "amax")
    return (lowest >= highest).float().mean().item()
