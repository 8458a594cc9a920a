"""Makes the parts of a run from its config."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from unirl.cluster.calls import WorkerGroup
from unirl.cluster.inprocess import InProcessGroup
from unirl.cluster.layout import RankGrid
from unirl.cluster.models import ActorProxy, CriticProxy, PolicyProxy
from unirl.config.geometry import Geometry, critic_steps, longest_sample, placement, runs_on_ray, total_steps
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
from unirl.train.megatron.hosted import HostedModel
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


def make_engine(config: TrainConfig, workers: WorkerGroup | None = None) -> RolloutEngine:
    """The engine of `rollout.engine`, on the devices of the run, or on this machine where there are no workers.

    Raises UserError where it does not start.
    """
    if config.rollout.engine == "sglang":
        return make_sglang_engine(config, workers.berths() if workers is not None else ())
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


@dataclass(frozen=True)
class Models:
    """The models of a run as the driver sees them, and the workers that host them."""

    workers: WorkerGroup
    actor: ActorProxy
    critic: CriticProxy | None
    reference: PolicyProxy | None


def make_models(config: TrainConfig, say: Callable[[str], None]) -> Models:
    """Start the workers: one in this process, or one for each device on Ray."""
    host = partial(host_models, config)
    if runs_on_ray(config):
        workers: WorkerGroup = _make_supervised(config, host, say)
    else:
        workers = InProcessGroup(host)
    hosted = workers.facts.keys()
    return Models(
        workers,
        ActorProxy(workers, "actor"),
        CriticProxy(workers, "critic") if "critic" in hosted else None,
        PolicyProxy(workers, "reference") if "reference" in hosted else None,
    )


def _make_supervised(
    config: TrainConfig, host: Callable[[], dict[str, HostedModel]], say: Callable[[str], None]
) -> WorkerGroup:
    try:
        from unirl.cluster.supervised import ClusterOptions, SupervisedGroup  # a run in one process needs no Ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError(
            f"num_devices={config.num_devices}, cluster.mode={config.cluster.mode}: runs of several processes need "
            "Ray; install unirl-megatron[cluster]"
        ) from error
    geometry, cluster, placed = Geometry.of(config), config.cluster, placement(config)
    options = ClusterOptions(
        address=cluster.address,
        bundles=placed.trainer_bundles,
        timeout_s=cluster.timeout_s,
        heartbeat_s=cluster.heartbeat_s,
        max_restarts=cluster.max_restarts,
        object_store_gb=cluster.object_store_gb,
        report_dir=Path(config.run_dir),
        engines=placed.engines,
    )
    grid = RankGrid(tp=geometry.tp, pp=geometry.pp, cp=geometry.cp, dp=geometry.dp)
    return SupervisedGroup(host, grid, options, say)


def host_models(config: TrainConfig) -> dict[str, HostedModel]:
    """Make the models of one rank, by the names of `Models`: what runs in every worker."""
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    with ExitStack() as on_error:
        models: dict[str, HostedModel] = {"actor": make_actor(config)}
        on_error.callback(models["actor"].close)
        for name, make in (("critic", make_critic), ("reference", make_reference)):
            model = make(config, models["actor"])
            if model is not None:
                models[name] = model
                on_error.callback(model.close)
        on_error.pop_all()
    return models


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
