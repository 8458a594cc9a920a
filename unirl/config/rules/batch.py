"""How prompts, samples and tokens divide over ranks, updates and micro-batches."""

from unirl.config.geometry import (
    longest_response,
    longest_sample,
    model_devices,
    multiples_around,
    neighbours,
    total_steps,
    trainer_devices,
)
from unirl.config.rules.rule import rule
from unirl.config.schema import TrainConfig

_DP = ("num_devices", "cluster.layout", "rollout.num_devices", "parallel.tp", "parallel.pp", "parallel.cp")


@rule("batch_size", "stack.num_updates_per_batch", *_DP)
def prompts_spread_over_ranks(config: TrainConfig) -> str | None:
    """batch_size / num_updates_per_batch, the prompts of one optimizer step, is a multiple of the data-parallel size:
    all samples of a prompt stay on one rank.
    """
    unit = model_devices(config)
    updates = config.stack.num_updates_per_batch
    if trainer_devices(config) % unit or config.batch_size % updates:
        return None
    ranks = trainer_devices(config) // unit
    prompts = config.batch_size // updates
    if prompts % ranks == 0:
        return None
    per_step = f" in {updates} updates of {prompts}" if updates > 1 else ""
    sizes = multiples_around(config.batch_size, ranks * updates)
    fewer = neighbours(ranks, [count for count in range(1, prompts + 1) if prompts % count == 0])
    return (
        f"batch_size={config.batch_size} prompts{per_step} cannot be spread over {ranks} data-parallel ranks "
        f"({_devices(config)} / (tp*pp*cp = {unit})): a rank takes whole prompts; use "
        f"batch_size={_options(sizes)}, or {_options([count * unit for count in fewer])} devices"
    )


def _devices(config: TrainConfig) -> str:
    """Those that train, as keys name them."""
    name = f"num_devices={config.num_devices}"
    return name if config.cluster.layout == "colocate" else f"({name} - rollout.num_devices)"


@rule("stack.num_updates_per_batch", "batch_size")
def updates_divide_the_batch(config: TrainConfig) -> str | None:
    """batch_size is a multiple of num_updates_per_batch: each update takes the same number of prompts."""
    updates = config.stack.num_updates_per_batch
    if config.batch_size % updates == 0:
        return None
    valid = [count for count in range(1, config.batch_size + 1) if config.batch_size % count == 0]
    return (
        f"batch_size={config.batch_size} prompts cannot be split into {updates} equal mini-batches; use "
        f"stack.num_updates_per_batch={_options(neighbours(updates, valid))}, or "
        f"batch_size={_options(multiples_around(config.batch_size, updates))}"
    )


@rule(
    "stack.micro_batch_tokens",
    "data.max_prompt_tokens",
    "sampling.max_new_tokens",
    "rollout.environment",
    "rollout.max_episode_tokens",
)
def longest_sample_fits(config: TrainConfig) -> str | None:
    """The longest sample, max_prompt_tokens + max_new_tokens (or max_episode_tokens), fits into micro_batch_tokens."""
    prompt, response, budget = config.data.max_prompt_tokens, longest_response(config), config.stack.micro_batch_tokens
    if longest_sample(config) <= budget:
        return None
    bound = "sampling.max_new_tokens" if config.rollout.environment is None else "rollout.max_episode_tokens"
    return (
        f"the longest sample has data.max_prompt_tokens + {bound} = {prompt} + {response} = "
        f"{prompt + response} tokens, more than a micro-batch of {budget}; use at least {prompt + response}"
    )


@rule("optimizer.warmup_steps", "num_iterations", "stack.num_updates_per_batch", "algorithm.critic")
def warmup_ends(config: TrainConfig) -> str | None:
    """warmup_steps is at most the total number of optimizer steps, num_iterations * num_updates_per_batch, without the
    iterations in which the critic warms up.
    """
    steps = total_steps(config)
    if config.optimizer.warmup_steps <= steps:
        return None
    return (
        f"{config.optimizer.warmup_steps} warm-up steps, but the run has (num_iterations - "
        f"algorithm.critic.warmup_iterations) * stack.num_updates_per_batch = {steps}; use at most {steps}"
    )


def _options(values: list[int]) -> str:
    return " or ".join(map(str, values))
