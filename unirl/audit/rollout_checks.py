"""What `python -m unirl.audit rollout` does with the engine and the actor of a recipe."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from unirl.config.schema import TrainConfig
from unirl.data import Prompt
from unirl.rollout import single_turn
from unirl.rollout.engine import RolloutEngine
from unirl.rollout.weights import LocalWeights
from unirl.sync import WeightSync
from unirl.train.log_prob_pass import log_prob_pass
from unirl.train.megatron.actor import MegatronActor
from unirl.trainer.mismatch import Mismatch
from unirl.trainer.setup import load_data, make_actor, make_engine, prepare_model
from unirl.types import Part, SamplingParams

TEMPERATURES = (0.6, 1.0, 1.3)
BATCHES = ((1, 1), (2, 4), (8, 8))
"""(prompts, samples of each) of a batch."""

NUM_SYNCS = 10


@dataclass(frozen=True)
class Check:
    """One batch, and how far engine and actor are apart on its tokens."""

    about: str
    tokens: int
    mean: float
    p99: float
    largest: float
    passed: bool


def run_checks(config: TrainConfig, mean_limit: float, p99_limit: float) -> Iterator[Check]:
    """Every batch of the audit, and the drift over `NUM_SYNCS` syncs of weights that do not change."""
    with ExitStack() as resources:
        prepare_model(config.model, print)
        data = load_data(config, print)
        actor = make_actor(config)
        resources.callback(actor.close)
        engine = make_engine(config)
        resources.callback(engine.close)
        audit = _Audit(config, [data.train[i] for i in range(min(len(data.train), BATCHES[-1][0]))], actor, engine)
        audit.sync.publish(1)
        params = _sampling_params(config)
        longest = params.max_new_tokens
        for temperature in TEMPERATURES:
            for length in sorted({min(8, longest), longest}):
                for num_prompts, num_samples in BATCHES:
                    found = audit.mismatch(
                        replace(params, max_new_tokens=length, temperature=temperature), num_prompts, num_samples
                    ).metrics()
                    about = f"T {temperature:g}, {length} tokens, {num_prompts} x {num_samples} samples"
                    yield _judge(about, found, audit.num_tokens, mean_limit, p99_limit)
        yield audit.drift(params)


class _Audit:
    """Samples with the engine, replays with the actor."""

    def __init__(self, config: TrainConfig, prompts: Sequence[Prompt], actor: MegatronActor, engine: RolloutEngine):
        self.config, self.prompts, self.actor, self.engine = config, prompts, actor, engine
        self.sync = WeightSync(LocalWeights(actor.export_weights), engine)
        self.num_tokens = 0

    def mismatch(self, params: SamplingParams, num_prompts: int, num_samples: int) -> Mismatch:
        """Of a batch of the first prompts."""
        part = self._draw(params, num_prompts, num_samples)
        self.actor.temperature = params.temperature
        found = Mismatch.of(part, log_prob_pass(self.actor, part, self.config.stack))
        self.num_tokens = found.differences.numel()
        return found

    def _draw(self, params: SamplingParams, num_prompts: int, num_samples: int) -> Part:
        return single_turn(
            self.engine,
            self.prompts[:num_prompts],
            params=params,
            seed=self.config.seed,
            iteration=0,
            num_samples=num_samples,
            first_sample_id=0,
        )

    def drift(self, params: SamplingParams) -> Check:
        """The same prompt and seed after each of many syncs of the same weights: nothing may change.

        One sample at a time, since batches of other sizes round differently.
        """
        means = []
        for version in range(2, NUM_SYNCS + 2):
            self.sync.publish(version)
            found = self.mismatch(params, 1, 1).metrics()
            means.append(found["rollout_replay_logp_absdiff_mean"])
        spread = max(means) - min(means)
        about = f"{NUM_SYNCS} syncs of the same weights: largest - smallest"
        return Check(about, self.num_tokens, spread, spread, spread, passed=spread == 0)


def _sampling_params(config: TrainConfig) -> SamplingParams:
    """Those of training, but for the stop tokens."""
    sampling = config.sampling
    return SamplingParams(
        sampling.max_new_tokens,
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        return_support=sampling.replay_support,
    )


def _judge(about: str, found: dict[str, float], tokens: int, mean_limit: float, p99_limit: float) -> Check:
    mean, p99, largest = (found[f"rollout_replay_logp_absdiff_{name}"] for name in ("mean", "p99", "max"))
    return Check(about, tokens, mean, p99, largest, passed=mean <= mean_limit and p99 <= p99_limit)
