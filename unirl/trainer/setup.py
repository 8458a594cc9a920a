"""Makes the parts of a run from its config."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from unirl.config.geometry import critic_steps, longest_sample, total_steps
from unirl.config.schema import ModelConfig, TrainConfig
from unirl.data import PromptDataset, PromptSampler, load_prompts
from unirl.data.tokenizer import load_tokenizer, stop_token_ids
from unirl.errors import UserError
from unirl.reward import RewardService
from unirl.rollout import EpisodeLimits, MultiTurnWorkflow, load_environment, single_turn
from unirl.rollout.engine import RolloutEngine
from unirl.rollout.native import NativeRolloutEngine
from unirl.rollout.workflow import Workflow
from unirl.train.megatron.actor import MegatronActor
from unirl.train.megatron.architecture import read_architecture
from unirl.train.megatron.critic import MegatronCritic
from unirl.train.megatron.hf_folder import resolve_folder
from unirl.train.megatron.policy import MegatronPolicy
from unirl.trainer.sglang_setup import make_sglang_engine
from unirl.utils.dotted import load_callable


@dataclass(frozen=True)
class Data:
    """Prompts and what reads them; `heldout` is None where nothing is evaluated."""

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    train: PromptDataset
    heldout: PromptDataset | None
    sampler: PromptSampler


def prepare_model(config: ModelConfig, say: Callable[[str], None]) -> None:
    """Make the model folder with `model.maker` where it does not exist yet."""
    if config.maker is None or Path(config.path).exists():
        return
    say(f"{config.path} does not exist: making it with {config.maker}")
    load_callable("model.maker", config.maker, "(path)")(config.path)


def load_data(config: TrainConfig, say: Callable[[str], None]) -> Data:
    """Tokenizer, training prompts with their sampler, evaluation prompts; what was dropped is said."""
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    train = load_prompts(config.data, tokenizer, split="train")
    say(f"training prompts: {train.report.summary()}")
    heldout = None
    if config.data.kind == "reasoning_gym" or config.eval.path:
        heldout = load_prompts(
            config.data, tokenizer, split="heldout", path=config.eval.path, max_prompts=config.eval.max_prompts
        )
        say(f"evaluation prompts: {heldout.report.summary()}")
    return Data(
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids(config.model.path, tokenizer),
        train=train,
        heldout=heldout,
        sampler=PromptSampler(len(train), config.data.seed, config.data.shuffle),
    )


def make_engine(config: TrainConfig) -> RolloutEngine:
    """The engine of `rollout.engine`. Raises UserError where it does not start."""
    if config.rollout.engine == "sglang":
        return make_sglang_engine(config)
    return NativeRolloutEngine(config.model.path, max_batch_size=config.rollout.max_batch_size)


def make_reward(config: TrainConfig) -> AbstractContextManager[RewardService | None]:
    """The service that grades with `reward.scorer`; None where `rollout.environment` gives the rewards."""
    if config.rollout.environment is not None:
        return nullcontext()
    reward = config.reward
    return RewardService(
        reward.scorer,
        num_workers=reward.num_workers,
        timeout_s=reward.timeout_s,
        max_response_chars=reward.max_response_chars,
    )


def make_workflow(config: TrainConfig, data: Data, engine: RolloutEngine) -> Workflow:
    """How samples are drawn: in one turn, or in episodes with `rollout.environment`.

    Raises UserError where the environment cannot be made, the tokenizer's chat template cannot be continued, or the
    longest episode is longer than the model's positions.
    """
    rollout = config.rollout
    if rollout.environment is None:
        return partial(single_turn, engine)
    folder = resolve_folder(config.model.path)
    architecture = read_architecture(folder, trust_remote_code=config.model.trust_remote_code)
    positions = architecture.max_position_embeddings
    if longest_sample(config) > positions:
        raise UserError(
            f"rollout.max_episode_tokens={rollout.max_episode_tokens} and data.max_prompt_tokens="
            f"{config.data.max_prompt_tokens} make {longest_sample(config)} tokens, more than the {positions} "
            f"positions of model.path={config.model.path}; lower one of them"
        )
    return MultiTurnWorkflow(
        engine,
        load_environment(rollout.environment, rollout.environment_args),
        data.tokenizer,
        stop_token_ids=data.stop_token_ids,
        limits=EpisodeLimits(rollout.max_turns, rollout.max_episode_tokens),
    )


def make_actor(config: TrainConfig) -> MegatronActor:
    """The policy under training."""
    return MegatronActor(
        config.model,
        parallel=config.parallel,
        optimizer=config.optimizer,
        stack=config.stack,
        temperature=config.algorithm.temperature,
        total_steps=total_steps(config),
        seed=config.seed,
    )


def make_reference(config: TrainConfig, actor: MegatronActor) -> MegatronPolicy | None:
    """The frozen policy of `model.reference_path`, or None. Raises UserError where its vocabulary is another one."""
    path = config.model.reference_path
    if path is None:
        return None
    reference = MegatronPolicy(
        replace(config.model, path=path),
        parallel=config.parallel,
        temperature=actor.temperature,
        seed=config.seed,
        logits_chunk_tokens=config.stack.logits_chunk_tokens,
    )
    if reference.vocab_size != actor.vocab_size:
        found = reference.vocab_size
        reference.close()
        raise UserError(
            f"model.reference_path={path} has {found} token ids, model.path={config.model.path} has "
            f"{actor.vocab_size}: log-probs compare only between policies of the same tokenizer"
        )
    return reference


def make_critic(config: TrainConfig, actor: MegatronActor) -> MegatronCritic | None:
    """The value model of `algorithm.critic`, or None. Raises UserError where its token ids are not the actor's."""
    critic_config = config.algorithm.critic
    if critic_config is None:
        return None
    model = replace(config.model, path=critic_config.path or config.model.path)
    critic = MegatronCritic(
        model,
        parallel=config.parallel,
        optimizer=critic_config.optimizer,
        max_grad_norm=critic_config.max_grad_norm,
        total_steps=critic_steps(config),
        seed=config.seed,
        recompute=config.stack.recompute,
    )
    if critic.vocab_size != actor.vocab_size:
        found = critic.vocab_size
        critic.close()
        raise UserError(
            f"algorithm.critic.path={model.path} has {found} token ids, model.path={config.model.path} has "
            f"{actor.vocab_size}: the critic reads the policy's tokens, so take a model of the same tokenizer"
        )
    return critic
