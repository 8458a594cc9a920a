"""Collects the graded samples of an iteration."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import torch

from unirl.config.schema import TrainConfig
from unirl.errors import UserError
from unirl.observe.console import RunDisplay
from unirl.reward import RewardService, shape_rewards
from unirl.rollout.engine import RolloutEngine
from unirl.trainer.dynamic_sampling import GroupSelection
from unirl.trainer.group_filter import GroupFilter
from unirl.trainer.setup import Data, make_workflow
from unirl.types import Part, SamplingParams


@dataclass(frozen=True)
class Batch:
    """`part`: the graded samples to train on, none at all where a filter rejected every group; `drawn`: all those that
    were sampled for it. With what that took: metrics, and seconds by `time/...` name.
    """

    part: Part
    drawn: Part
    metrics: dict[str, float | None]
    seconds: dict[str, float]


class Collector:
    """Draws prompts, samples responses, grades them, shapes their rewards, and keeps what the group filter keeps."""

    def __init__(
        self,
        config: TrainConfig,
        data: Data,
        engine: RolloutEngine,
        reward: RewardService | None,
        group_filter: GroupFilter | None = None,
    ):
        self.config = config
        self.data = data
        self.workflow = make_workflow(config, data, engine)
        self.reward = reward
        self.group_filter = group_filter
        sampling = config.sampling
        self.params = SamplingParams(
            sampling.max_new_tokens,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            data.stop_token_ids,
            return_support=sampling.replay_support,
        )

    def collect(self, iteration: int, first_sample_id: int, display: RunDisplay) -> Batch:
        """The batch of `iteration` (from 0): batch_size prompts with sampling.num_samples samples each, or what dynamic
        sampling makes of that. Samples are numbered from `first_sample_id`, groups by their first sample.
        """
        selection = GroupSelection(self.config, self.group_filter)
        grades, failures, seconds = [], Counter(), Counter()
        while wanted := selection.next_round():
            with display.phase(_rollout_title(selection), wanted * self.config.sampling.num_samples) as rollout:
                part = self.workflow(
                    [self.data.train[i] for i in self.data.sampler.next_batch(wanted)],
                    params=self.params,
                    seed=self.config.seed,
                    iteration=iteration,
                    num_samples=self.config.sampling.num_samples,
                    first_position=selection.num_groups,
                    first_sample_id=first_sample_id + selection.num_samples,
                    on_progress=rollout.update,
                )
            with display.phase("reward") as reward:
                grades.append(self.grade(part))
            failures.update(self._grading_failures())
            selection.add(part.with_rewards(self._shaped(grades[-1], part)))
            seconds.update({"time/rollout": rollout.seconds, "time/reward": reward.seconds})
        if shortfall := selection.shortfall():
            display.message(f"iteration {iteration + 1}: {shortfall}")
        return Batch(
            part=selection.trained(),
            drawn=selection.drawn(),
            metrics={"reward/grade_mean": _finite_mean(torch.cat(grades)), **failures, **selection.metrics()},
            seconds=dict(seconds),
        )

    def grade(self, part: Part) -> torch.Tensor:
        """[N] float32: the grades that an environment gave, else those of the responses' text; NaN where there is no
        verdict. Raises UserError where a scorer has no verdict on any of them.
        """
        if part.rewards is not None:
            return part.rewards
        spans = [slice(*bounds) for bounds in pairwise(part.text.cu_seqlens.tolist())]
        responses = [part.text.tokens[span][part.text.loss_mask[span]].tolist() for span in spans]
        texts = self.data.tokenizer.batch_decode(responses, skip_special_tokens=True)
        grades = torch.tensor(self.reward.score(texts, list(part.records)))
        self._check_some_verdict(grades)
        return grades

    def _shaped(self, grades: torch.Tensor, part: Part) -> torch.Tensor:
        return shape_rewards(
            grades,
            part.text.status,
            part.text.response_lengths,
            config=self.config.reward,
            max_new_tokens=self.config.sampling.max_new_tokens,
        )

    def _check_some_verdict(self, grades: torch.Tensor) -> None:
        """A scorer that fails on every response will fail on the next batch, too."""
        if grades.numel() and grades.isnan().all():
            raise UserError(
                f"reward.scorer={self.reward.scorer} gave no verdict on any of {grades.numel()} responses: "
                f"{'; '.join(self.reward.stats.messages)}"
            )

    def _grading_failures(self) -> dict[str, int]:
        """Of the last call of the reward service, where there is one."""
        if self.reward is None:
            return {}
        return {"reward/timeouts": self.reward.stats.timeouts, "reward/errors": self.reward.stats.errors}


def _finite_mean(values: torch.Tensor) -> float | None:
    finite = values[values.isfinite()]
    return finite.mean().item() if finite.numel() else None


def _rollout_title(selection: GroupSelection) -> str:
    if not selection.rounds:
        return "rollout"
    return f"rollout, round {selection.rounds + 1} ({selection.num_kept} groups kept)"
