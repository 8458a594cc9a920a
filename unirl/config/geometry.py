"""How a config spreads over devices and splits its batches: the arithmetic that rules and --dry-run share."""

import math
from dataclasses import dataclass

from unirl.cluster.layout import RankGrid
from unirl.cluster.placement import Placement, place
from unirl.config.schema import TrainConfig


@dataclass(frozen=True)
class Geometry:
    """Counts that follow from a valid config. A sample is one response to one prompt; lengths are in tokens."""

    devices: int
    nodes: int
    tp: int
    pp: int
    cp: int
    ep: int
    dp: int
    prompts: int
    max_prompts_drawn: int
    samples: int
    samples_per_dp_rank: int
    longest_sample: int
    micro_batch_tokens: int
    steps_per_iteration: int
    prompts_per_step: int
    total_steps: int

    @classmethod
    def of(cls, config: TrainConfig) -> "Geometry":
        parallel, stack = config.parallel, config.stack
        dp = trainer_devices(config) // model_devices(config)
        samples = config.batch_size * config.sampling.num_samples
        return cls(
            devices=config.num_devices,
            nodes=math.ceil(config.num_devices / config.devices_per_node),
            tp=parallel.tp,
            pp=parallel.pp,
            cp=parallel.cp,
            ep=parallel.ep,
            dp=dp,
            prompts=config.batch_size,
            max_prompts_drawn=max_prompts_drawn(config),
            samples=samples,
            samples_per_dp_rank=samples // dp,
            longest_sample=longest_sample(config),
            micro_batch_tokens=stack.micro_batch_tokens,
            steps_per_iteration=stack.num_updates_per_batch,
            prompts_per_step=config.batch_size // stack.num_updates_per_batch,
            total_steps=total_steps(config),
        )


def model_devices(config: TrainConfig) -> int:
    """Devices that hold one copy of the model: tp * pp * cp."""
    return config.parallel.tp * config.parallel.pp * config.parallel.cp


def trainer_devices(config: TrainConfig) -> int:
    """Devices that train: all, or with cluster.layout=split those that do not sample."""
    sampling = config.rollout.num_devices if config.cluster.layout == "split" else None
    left = config.num_devices - (sampling or 0)
    return left if left > 0 else config.num_devices  # there is a rule for a split that leaves none


def placement(config: TrainConfig) -> Placement:
    """Ranks and SGLang servers on nodes and devices. Raises PlacementError where they do not fit."""
    parallel, rollout = config.parallel, config.rollout
    dp = trainer_devices(config) // model_devices(config)
    return place(
        RankGrid(tp=parallel.tp, pp=parallel.pp, cp=parallel.cp, dp=dp),
        devices_per_node=config.devices_per_node,
        engine_devices=rollout.tp if rollout.engine == "sglang" and runs_on_ray(config) and not rollout.urls else 0,
        num_engines=rollout.num_servers,
        rollout_devices=rollout.num_devices if config.cluster.layout == "split" else None,
    )


def runs_on_ray(config: TrainConfig) -> bool:
    """Whether the models live in processes of their own."""
    mode = config.cluster.mode
    return mode == "ray" or (mode == "auto" and config.num_devices > 1)


def releases_memory(config: TrainConfig) -> bool:
    """Whether servers give back their memory while the trainer computes."""
    rollout = config.rollout
    if rollout.release_memory is not None:
        return rollout.release_memory
    is_shared = config.cluster.layout == "colocate" and runs_on_ray(config)
    return is_shared and rollout.engine == "sglang" and not rollout.urls


def longest_sample(config: TrainConfig) -> int:
    """Tokens of the longest prompt with the longest response or episode."""
    return config.data.max_prompt_tokens + longest_response(config)


def longest_response(config: TrainConfig) -> int:
    """Most tokens behind a prompt: a response, or what an episode with an environment may take."""
    if config.rollout.environment is None:
        return config.sampling.max_new_tokens
    return config.rollout.max_episode_tokens or config.sampling.max_new_tokens


def max_prompts_drawn(config: TrainConfig) -> int:
    """Prompts that an iteration draws at most, to have batch_size groups left by algorithm.dynamic_filter."""
    algorithm = config.algorithm
    rounds = 1 if algorithm.dynamic_filter is None or algorithm.dynamic_bs else algorithm.max_sampling_rounds
    return config.batch_size * rounds


def total_steps(config: TrainConfig) -> int:
    """Optimizer steps that the policy makes in the whole run: none while the critic warms up."""
    critic = config.algorithm.critic
    iterations = config.num_iterations - (critic.warmup_iterations if critic else 0)
    return iterations * config.stack.num_updates_per_batch


def critic_steps(config: TrainConfig) -> int:
    """Optimizer steps that the critic makes in the whole run, where there is one."""
    return config.num_iterations * config.stack.num_updates_per_batch


def multiples_around(value: int, unit: int) -> list[int]:
    """The multiples of `unit` next to `value`, below and above, without 0: (4, 8) -> [8], (62, 8) -> [56, 64]."""
    below = value // unit * unit
    return [count for count in (below, below + unit) if count > 0]


def neighbours(value: int, valid: list[int]) -> list[int]:
    """The largest of `valid` (ascending) below `value` and the smallest above it."""
    below = [count for count in valid if count < value]
    above = [count for count in valid if count > value]
    return below[-1:] + above[:1]
