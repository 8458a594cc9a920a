"""Multi-turn rollouts: a batch of episodes, each between the policy and an environment of its own, turn by turn."""

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from unirl.errors import UserError
from unirl.rollout.chat import ChatContinuation
from unirl.rollout.engine import ProgressCallback, RolloutEngine
from unirl.rollout.environment import Environment, EnvironmentFactory, StepResult, check_messages, check_step
from unirl.rollout.pack import Row, pack_rows
from unirl.rollout.workflow import Prompt, sample_seed
from unirl.types import Completion, GenerationRequest, Part, SampleStatus, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SHOWN_ERRORS = 3


@dataclass(frozen=True)
class EpisodeLimits:
    """Where an episode is cut off. max_turns: generated spans. max_episode_tokens: everything behind the prompt,
    responses and observations.
    """

    max_turns: int
    max_episode_tokens: int


class MultiTurnWorkflow:
    """Runs episodes against environments; a `Workflow`.

    All live episodes take their turn in one `RolloutEngine.generate`. The context of a turn is the exact token ids of
    the episode so far and those of the observation, see `ChatContinuation`: nothing sampled is tokenised again.

    An episode is `COMPLETED` when its environment is done; `TRUNCATED` when a turn was cut off (its environment still
    judges the response), or `limits` leave no room for another turn; `ABORTED` when its environment raised or the
    engine gave a turn up. Its reward is the sum of its turns' rewards, NaN where aborted.

    Raises UserError where the tokenizer's chat template cannot be continued turn by turn.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        environment: EnvironmentFactory,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        stop_token_ids: Sequence[int],
        limits: EpisodeLimits,
    ):
        self._engine = engine
        self._environment = environment
        self._tokenizer = tokenizer
        self._limits = limits
        self._chat = ChatContinuation(tokenizer, stop_token_ids)

    def __call__(
        self,
        prompts: Sequence[Prompt],
        *,
        params: SamplingParams,
        seed: int,
        iteration: int,
        num_samples: int,
        first_sample_id: int,
        first_position: int = 0,
        on_progress: ProgressCallback | None = None,
    ) -> Part:
        """`num_samples` episodes of each prompt, one sample each, with `rewards` and `turn_rewards`.

        `params.max_new_tokens` bounds each turn. Ids and seeds are those of `single_turn`: an episode of one turn draws
        what a single-turn sample draws. `on_progress` hears of finished episodes.
        """
        episodes = [
            _Episode(
                prompt,
                group_id=first_sample_id + position * num_samples,
                seed=sample_seed(seed, iteration, first_position + position, sample),
            )
            for position, prompt in enumerate(prompts)
            for sample in range(num_samples)
        ]
        for episode in episodes:
            self._reset(episode)
        while live := [episode for episode in episodes if episode.status is None]:
            if on_progress:
                on_progress(len(episodes) - len(live))
            completions = self._generate(live, params)
            responses = self._tokenizer.batch_decode([done.token_ids for done in completions], skip_special_tokens=True)
            for episode, completion, response in zip(live, completions, responses, strict=True):
                self._take_turn(episode, completion, response)
        _report_errors(episodes)
        return _pack(episodes, first_sample_id)

    def _generate(self, live: Sequence["_Episode"], params: SamplingParams) -> list[Completion]:
        """One completion for each episode. Episodes that stand at the same tokens share one request."""
        together: dict[tuple, list[_Episode]] = defaultdict(list)
        for episode in live:
            budget = min(params.max_new_tokens, self._room(episode))
            together[tuple(episode.context), budget].append(episode)
        requests = [
            GenerationRequest(
                prompt_ids=context,
                params=replace(params, max_new_tokens=budget),
                seeds=tuple(turn_seed(episode.seed, len(episode.turns)) for episode in members),
            )
            for (context, budget), members in together.items()
        ]
        answers = self._engine.generate(requests)
        by_episode = {
            id(episode): completion
            for members, completions in zip(together.values(), answers, strict=True)
            for episode, completion in zip(members, completions, strict=True)
        }
        return [by_episode[id(episode)] for episode in live]

    def _reset(self, episode: "_Episode") -> None:
        try:
            episode.environment = self._environment()
            opening = check_messages(episode.environment.reset(episode.prompt.record, episode.seed))
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - foreign code: counted and shown, its episode is not trained on
            episode.abort(error)
            return
        if opening:
            context = self._chat.after_prompt(episode.context, opening)
            episode.observe(context, grown=len(context) - len(episode.context))
        if self._room(episode) < 1:
            episode.status = SampleStatus.TRUNCATED

    def _take_turn(self, episode: "_Episode", completion: Completion, response: str) -> None:
        if completion.status == SampleStatus.ABORTED:
            episode.abort(RuntimeError("the rollout engine gave the turn up"), completion)
            return
        try:
            result = check_step(episode.environment.step(response))
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - foreign code: counted and shown, its episode is not trained on
            episode.abort(error, completion)
            return
        episode.add_turn(completion, float(result.reward))
        self._go_on(episode, completion, result)

    def _go_on(self, episode: "_Episode", completion: Completion, result: StepResult) -> None:
        """Give the episode the context of its next turn, or its status."""
        if completion.status == SampleStatus.TRUNCATED:
            episode.status = SampleStatus.TRUNCATED
        elif result.done:
            episode.status = SampleStatus.COMPLETED
        elif len(episode.turns) == self._limits.max_turns:
            episode.status = SampleStatus.TRUNCATED
        else:
            observation = self._chat.after_turn(completion.token_ids[-1], result.observation)
            if len(observation) >= self._room(episode):
                episode.status = SampleStatus.TRUNCATED
            else:
                episode.observe([*episode.context, *observation], grown=len(observation))

    def _room(self, episode: "_Episode") -> int:
        return self._limits.max_episode_tokens - episode.tokens_behind_prompt


def turn_seed(seed: int, turn: int) -> int:
    """The seed, in [0, 2**63), of turn number `turn` of a sample; the first turn has the sample's own."""
    if turn == 0:
        return seed
    return int(np.random.SeedSequence(seed, spawn_key=(turn,)).generate_state(1, np.uint64)[0] >> 1)


@dataclass
class _Turn:
    """`context`: how many tokens of the episode stand before the generated ones."""

    context: int
    completion: Completion
    reward: float


@dataclass
class _Episode:
    """An episode under way: `status` is None while it is live."""

    prompt: Prompt
    group_id: int
    seed: int
    context: list[int] = field(init=False)
    tokens_behind_prompt: int = 0
    turns: list[_Turn] = field(default_factory=list)
    environment: Environment | None = None
    status: SampleStatus | None = None
    error: str | None = None

    def __post_init__(self):
        self.context = list(self.prompt.token_ids)

    def observe(self, context: list[int], *, grown: int) -> None:
        self.context = context
        self.tokens_behind_prompt += grown

    def add_turn(self, completion: Completion, reward: float) -> None:
        self.turns.append(_Turn(len(self.context), completion, reward))
        self.observe([*self.context, *completion.token_ids], grown=len(completion.token_ids))

    def abort(self, error: Exception, completion: Completion | None = None) -> None:
        """End the episode, with its last turn `completion` as far as it was generated."""
        if completion is not None and completion.token_ids:
            self.add_turn(completion, reward=0.0)
        self.status = SampleStatus.ABORTED
        self.error = f"{type(error).__name__}: {error}"

    @property
    def reward(self) -> float:
        return math.nan if self.status == SampleStatus.ABORTED else math.fsum(turn.reward for turn in self.turns)

    def row(self) -> Row:
        """Without a turn, the context and an empty completion: it is counted like any other."""
        turns = self.turns or [_Turn(len(self.context), Completion((), (), self.status, ()), 0.0)]
        ends = [0, *(turn.context + len(turn.completion.token_ids) for turn in turns)]
        contexts = [self.context[end : turn.context] for end, turn in zip(ends, turns, strict=False)]
        return Row(contexts, [turn.completion for turn in turns], self.group_id, self.status, self.prompt.record)


def _pack(episodes: Sequence[_Episode], first_sample_id: int) -> Part:
    part = pack_rows([episode.row() for episode in episodes], first_sample_id=first_sample_id)
    turn_rewards = torch.zeros(part.text.tokens.numel())
    turn_rewards[part.text.turn_ends] = torch.tensor([turn.reward for episode in episodes for turn in episode.turns])
    rewards = torch.tensor([episode.reward for episode in episodes], dtype=torch.float32)
    return replace(part.with_rewards(rewards), turn_rewards=turn_rewards)


def _report_errors(episodes: Sequence[_Episode]) -> None:
    errors = [episode.error for episode in episodes if episode.error]
    if errors:
        shown = "; ".join(list(dict.fromkeys(errors))[:SHOWN_ERRORS])
        logger.warning(
            "%d of %d episodes were aborted and are left out of training: %s", len(errors), len(episodes), shown
        )
