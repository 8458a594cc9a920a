"""Multi-turn episodes."""

import re

from unirl.config.catalog import nearest
from unirl.config.rules.rule import rule
from unirl.config.schema import ENVIRONMENTS, TrainConfig


@rule("rollout.environment")
def environment_is_known(config: TrainConfig) -> str | None:
    """rollout.environment is null, a built-in name or a dotted path."""
    name = config.rollout.environment
    if name is None or name in ENVIRONMENTS or re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name):
        return None
    return (
        f"found {name!r}, expected one of {', '.join(ENVIRONMENTS)}, or the dotted path of a class; the nearest is "
        f"{nearest(name, list(ENVIRONMENTS))}"
    )


@rule("rollout.max_episode_tokens", "rollout.environment", "sampling.max_new_tokens")
def episodes_end(config: TrainConfig) -> str | None:
    """rollout.max_episode_tokens is given with an environment, and at least sampling.max_new_tokens."""
    longest, turn = config.rollout.max_episode_tokens, config.sampling.max_new_tokens
    if config.rollout.environment is None or (longest is not None and longest >= turn):
        return None
    if longest is None:
        return "is not set: an episode of rollout.environment needs a bound on its tokens behind the prompt"
    return f"found {longest}, expected at least the tokens of one turn, sampling.max_new_tokens={turn}"


@rule("rollout.environment", "rollout.rows", "rollout.max_episode_tokens", "rollout.environment_args")
def episode_keys_have_an_environment(config: TrainConfig) -> str | None:
    """rollout.rows=step, max_episode_tokens and environment_args need rollout.environment."""
    rollout = config.rollout
    given = {
        "rollout.rows=step": rollout.rows == "step",
        "rollout.max_episode_tokens": rollout.max_episode_tokens is not None,
        "rollout.environment_args": bool(rollout.environment_args),
    }
    names = [name for name, is_given in given.items() if is_given]
    if rollout.environment is not None or not names:
        return None
    return f"is null, and {', '.join(names)} would not be read: name an environment, or leave them at their defaults"


@rule("data.chat_template", "rollout.environment")
def turns_need_a_template(config: TrainConfig) -> str | None:
    """rollout.environment needs data.chat_template: observations are chat messages."""
    if config.data.chat_template or config.rollout.environment is None:
        return None
    return "found false, but the observations of rollout.environment are chat messages; set it to true"


@rule("reward.truncated_reward", "rollout.environment")
def episodes_keep_their_rewards(config: TrainConfig) -> str | None:
    """reward.truncated_reward is keep with an environment, which gives its rewards turn by turn."""
    mode = config.reward.truncated_reward
    if mode == "keep" or config.rollout.environment is None:
        return None
    return f"found {mode}, which judges single responses; with rollout.environment use keep"


@rule("algorithm.reward_norm", "algorithm.gae", "rollout.environment")
def turns_keep_their_rewards(config: TrainConfig) -> str | None:
    """algorithm.gae excludes algorithm.reward_norm with an environment: it reads the rewards of turns."""
    algorithm = config.algorithm
    if None in (algorithm.reward_norm, algorithm.gae, config.rollout.environment):
        return None
    return (
        "normalises the rewards of whole episodes, and algorithm.gae reads those of their turns; set it to null, or "
        "algorithm.gae=null"
    )


@rule("rollout.rows", "algorithm.gae")
def steps_have_no_gae(config: TrainConfig) -> str | None:
    """rollout.rows=step excludes algorithm.gae: its rows share the advantage of their episode."""
    if config.rollout.rows == "episode" or config.algorithm.gae is None:
        return None
    return (
        "found step, whose rows share the advantage of their episode, and algorithm.gae, which gives each token or "
        "turn its own; set it to episode, or algorithm.gae=null"
    )


@rule("algorithm.step_adv_const_length", "rollout.rows", run_only=True)
def steps_share_an_advantage(config: TrainConfig) -> str | None:
    """algorithm.step_adv_const_length needs rollout.rows=step."""
    found = config.algorithm.step_adv_const_length
    if found is None or config.rollout.rows == "step":
        return None
    return f"found {found:g}, which divides the advantage of the steps of rollout.rows=step; set that, or this to null"
