"""Evaluation: accuracy on prompts that are not trained on."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from unirl.data import Prompt
from unirl.rollout.workflow import Workflow
from unirl.types import Part, SampleStatus, SamplingParams

EVALUATION_STREAM = 2**31
"""Stands in the place of the iteration in the seeds of evaluation samples: no training iteration has its streams."""


def evaluate(
    workflow: Workflow,
    prompts: Sequence[Prompt],
    *,
    params: SamplingParams,
    num_samples: int,
    seed: int,
    grade: Callable[[Part], torch.Tensor],
    on_progress: Callable[[int], None] | None = None,
) -> tuple[dict[str, float], Part]:
    """Sample `num_samples` responses (n) per prompt and grade them; metrics by data source, and the graded samples.

    `eval/<source>/avg@n`: mean reward. `eval/<source>/pass@n`: share of prompts with a full reward (>= 1) among their
    n samples. `eval/<source>/truncated_fraction`. A sample without a verdict counts 0, and in `eval/<source>/ungraded`.
    The same `seed` draws the same random streams whatever the weights, so that evaluations of one run are paired.
    """
    part = workflow(
        prompts,
        params=params,
        seed=seed,
        iteration=EVALUATION_STREAM,
        num_samples=num_samples,
        first_sample_id=0,
        on_progress=on_progress,
    )
    rewards = grade(part)
    part = part.with_rewards(rewards)
    return _metrics(part, rewards.view(len(prompts), num_samples)), part


def _metrics(part: Part, rewards: torch.Tensor) -> dict[str, float]:
    """rewards [P, n], NaN without a verdict; the samples of `part` come prompt after prompt."""
    num_samples = rewards.shape[1]
    by_source = defaultdict(list)
    for row, record in enumerate(part.records[::num_samples]):
        by_source[record.get("data_source") or "default"].append(row)
    truncated = (part.text.status == SampleStatus.TRUNCATED).float().view_as(rewards)
    ungraded, rewards = rewards.isnan(), rewards.nan_to_num(0.0)
    metrics = {}
    for source, rows in sorted(by_source.items()):
        metrics[f"eval/{source}/avg@{num_samples}"] = rewards[rows].mean().item()
        metrics[f"eval/{source}/pass@{num_samples}"] = (rewards[rows] >= 1).any(1).float().mean().item()
        metrics[f"eval/{source}/truncated_fraction"] = truncated[rows].mean().item()
        metrics[f"eval/{source}/ungraded"] = int(ungraded[rows].sum())
    return metrics
