"""The micro-batch planner on lengths like those of DAPO: `python -m benchmarks.planner [--output FILE.json]`.

Response lengths are log-normal (sigma 0.6) with a mean of 4,000 and a cap of 8,000 tokens, prompts have 60 to 400,
groups have 8 samples; the costs are those of Qwen3-4B. Columns, see `plan_metrics`:

- `k`: micro-batches of a rank; `fill`: share of their budgets that is tokens of samples;
- `padding`: share of the tokens run that is padding or dummy; `max/mean`: work of the dearest rank over the mean one;
- `wasted`: what all ranks could do until the last is done and is not work on a sample: waiting, padding, dummies;
- `plan`, `pack`: CPU milliseconds of the plan, and of the tensors made from it.

The targets are `wasted` and `padding` <= 2 %, `max/mean` <= 1.03, and 50 ms of planning for 4,096 samples; those of
waste and imbalance are a test.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from unirl.algorithms import merge_metrics
from unirl.train.packing import plan_micro_batches
from unirl.train.plan import CostModel, ParallelShape
from unirl.train.plan_metrics import plan_metrics
from unirl.train.trees import SampleTable, plan_trees
from unirl.types import Part, TextSegment

QWEN3_4B = CostModel.of_transformer(
    num_layers=36,
    hidden_size=2560,
    ffn_hidden_size=9728,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151_936,
)
MEAN_TOKENS, MAX_TOKENS, SIGMA, GROUP = 4_000, 8_000, 0.6, 8


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    samples: int
    token_budget: int
    shape: ParallelShape
    share_prompts: bool = False


TARGET_CASES = [
    Case("dp 16", 512, 10_240, ParallelShape(dp=16)),
    Case("dp 16", 512, 32_768, ParallelShape(dp=16)),
]
CASES = [
    *TARGET_CASES,
    Case("dp 16, tp 8 with SP, cp 4", 512, 32_768, ParallelShape.of_layout(dp=16, tp=8, cp=4, sequence_parallel=True)),
    Case("dp 16, pp 4 interleaved", 512, 10_240, ParallelShape.of_layout(dp=16, pp=4, vpp=2)),
    Case("dp 16, shared prompts", 512, 32_768, ParallelShape(dp=16), share_prompts=True),
    Case("dp 64", 512, 10_240, ParallelShape(dp=64)),
    Case("dp 16", 64, 10_240, ParallelShape(dp=16)),
    Case("dp 16", 4_096, 10_240, ParallelShape(dp=16)),
    Case("dp 16", 4_096, 32_768, ParallelShape(dp=16)),
    Case("dp 16, shared prompts", 4_096, 32_768, ParallelShape(dp=16), share_prompts=True),
]


def dapo_like_part(num_samples: int, seed: int) -> Part:
    """Samples of these lengths; their tokens count up and mean nothing."""
    rng = np.random.default_rng(seed)
    responses = np.clip(rng.lognormal(_log_mean(), SIGMA, num_samples).astype(np.int64), 1, MAX_TOKENS)
    groups = np.arange(num_samples) // GROUP
    prompts = rng.integers(60, 400, groups[-1] + 1)[groups]
    lengths = torch.from_numpy(responses + prompts)
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    place = torch.arange(starts.numel()) - starts
    mask = place >= torch.repeat_interleave(torch.from_numpy(prompts), lengths)
    text = TextSegment(
        tokens=place,
        log_probs=-mask.float(),
        loss_mask=mask,
        turn_ids=torch.where(mask, 0, -1),
        weight_versions=torch.where(mask, 0, -1),
        lengths=lengths,
        sample_ids=torch.arange(num_samples),
        group_ids=torch.from_numpy(groups),
        episode_ids=torch.arange(num_samples),
        status=torch.zeros(num_samples, dtype=torch.int64),
    )
    return Part(text=text, records=({},) * num_samples, advantages=mask.float())


def _log_mean() -> float:
    """mu of the log-normal whose values, cut off at MAX_TOKENS, have a mean of MEAN_TOKENS."""
    quantiles = np.exp(SIGMA * np.random.default_rng(0).standard_normal(100_000))
    scale = float(MEAN_TOKENS)
    for _ in range(50):
        scale *= MEAN_TOKENS / np.minimum(scale * quantiles, MAX_TOKENS).mean()
    return float(np.log(scale))


def measure(case: Case, seed: int = 0) -> dict[str, float]:
    """The plan's metrics, and milliseconds of CPU time: `plan_ms`, `pack_ms`."""
    part = dapo_like_part(case.samples, seed)
    samples = torch.arange(case.samples)
    options = {"token_budget": case.token_budget, "share_prompts": case.share_prompts, "cost": QWEN3_4B}
    started = time.process_time()
    plan_trees(SampleTable(part.text), samples.tolist(), shape=case.shape, **options)
    planned = time.process_time()
    micro_batches = plan_micro_batches(part, samples, **options, **asdict(case.shape))
    packed = time.process_time()
    metrics = merge_metrics(
        [plan_metrics(micro_batches, dp=case.shape.dp, token_budget=case.token_budget, cost=QWEN3_4B)]
    )
    plan_ms = 1e3 * (planned - started)
    return {**metrics, "plan_ms": plan_ms, "pack_ms": 1e3 * (packed - planned) - plan_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the numbers to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'layout':26} samples  budget    k   fill  padding  max/mean  wasted    plan     pack")
    rows = []
    for case in CASES:
        found = measure(case, options.seed)
        rows.append({**asdict(case), **found})
        print(
            f"{case.name:26} {case.samples:7} {case.token_budget:7,} {found['plan/micro_batches']:4.0f} "
            f"{found['plan/budget_use']:6.1%} {found['plan/padding_waste']:8.2%} {found['plan/imbalance']:9.4f} "
            f"{found['plan/wasted_work']:7.2%} {found['plan_ms']:5.1f} ms {found['pack_ms']:5.0f} ms"
        )
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
