"""Collects the graded samples of an iteration."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from unirl.config.schema import TrainConfig
from unirl.observe.console import RunDisplay
from unirl.reward import RewardService, shape_rewards
from unirl.rollout.engine import RolloutEngine
from unirl.rollout.workflow import single_turn
from unirl.trainer.setup import Data
from unirl.types import Part, SamplingParams


@dataclass(frozen=True)
class Batch:
    """Graded samples with what collecting them took: metrics, and seconds by `time/...` name."""

    part: Part
    metrics: dict[str, float | None]
    seconds: dict[str, float]


class Collector:
    """Draws prompts, samples responses, grades and shapes their rewards."""

    def __init__(self, config: TrainConfig, data: Data, engine: RolloutEngine, reward: RewardService):
        self.config = config
        self.data = data
        self.engine = engine
        self.reward = reward
        sampling = config.sampling
        self.params = SamplingParams(
            sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k, data.stop_token_ids
        )

    def collect(self, iteration: int, display: RunDisplay) -> Batch:
        """The batch of `iteration` (from 0): batch_size prompts with sampling.num_samples samples each."""
        num_prompts, num_samples = self.config.batch_size, self.config.sampling.num_samples
        with display.phase("rollout", num_prompts * num_samples) as rollout:
            part = single_turn(
                self.engine,
                [self.data.train[i] for i in self.data.sampler.next_batch(num_prompts)],
                params=self.params,
                seed=self.config.seed,
                iteration=iteration,
                num_samples=num_samples,
                first_sample_id=iteration * num_prompts * num_samples,
                on_progress=rollout.update,
            )
        with display.phase("reward") as reward:
            grades = self.grade(part)
        shaped = shape_rewards(
            grades,
            part.text.status,
            part.text.response_lengths,
            config=self.config.reward,
            max_new_tokens=self.config.sampling.max_new_tokens,
        )
        return Batch(
            part=part.with_rewards(shaped),
            metrics=self._grading_metrics(grades),
            seconds={"time/rollout": rollout.seconds, "time/reward": reward.seconds},
        )

    def grade(self, part: Part) -> torch.Tensor:
        """[N] float32 grades of the responses' text; NaN where the scorer gave no verdict."""
        spans = [slice(*bounds) for bounds in pairwise(part.text.cu_seqlens.tolist())]
        responses = [part.text.tokens[span][part.text.loss_mask[span]].tolist() for span in spans]
        texts = self.data.tokenizer.batch_decode(responses, skip_special_tokens=True)
        return torch.tensor(self.reward.score(texts, list(part.records)))

    def _grading_metrics(self, grades: torch.Tensor) -> dict[str, float | None]:
        graded = grades[torch.isfinite(grades)]
        return {
            "reward/grade_mean": graded.mean().item() if graded.numel() else None,
            "reward/timeouts": self.reward.stats.timeouts,
            "reward/errors": self.reward.stats.errors,
        }
