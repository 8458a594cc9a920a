"""The critic, and advantages of single tokens."""

from unirl.config.geometry import critic_steps
from unirl.config.rules.rule import rule
from unirl.config.schema import TrainConfig


@rule("algorithm.critic", "algorithm.gae")
def critic_has_returns(config: TrainConfig) -> str | None:
    """algorithm.critic needs algorithm.gae: GAE makes its targets and is what its values are for."""
    if config.algorithm.critic is None or config.algorithm.gae is not None:
        return None
    return (
        "a critic without algorithm.gae has no returns to learn and nothing reads its values; set "
        "'algorithm.gae={gae_lambda: 0.95}', or algorithm.critic=null"
    )


@rule("algorithm.critic", "algorithm.reward_norm")
def critic_can_know_the_rewards(config: TrainConfig) -> str | None:
    """A critic excludes algorithm.reward_norm at the level of a group, whose baseline would be subtracted twice."""
    algorithm = config.algorithm
    if algorithm.critic is None or algorithm.reward_norm is None:
        return None
    if "group" not in (algorithm.reward_norm.mean_level, algorithm.reward_norm.std_level):
        return None
    return (
        "found a critic and algorithm.reward_norm at the level of a group: such rewards have a baseline already, and "
        "they depend on other samples, which the critic does not see; set algorithm.reward_norm=null, or "
        "algorithm.critic=null"
    )


@rule("algorithm.critic", "algorithm.success_filter")
def critic_decides_what_is_trained(config: TrainConfig) -> str | None:
    """A critic excludes algorithm.success_filter: it is the sign of the advantage that says what to train on."""
    if config.algorithm.critic is None or not config.algorithm.success_filter:
        return None
    return (
        "found a critic and algorithm.success_filter: a critic is there to tell how much better a token was than "
        "expected, and the filter drops all that was worse; set algorithm.success_filter=false, or "
        "algorithm.critic=null"
    )


@rule("algorithm.adv_norm.mean_leave1out", "algorithm.gae")
def tokens_are_not_left_out(config: TrainConfig) -> str | None:
    """algorithm.gae excludes algorithm.adv_norm.mean_leave1out: it would leave out a single token, not a sample."""
    if config.algorithm.gae is None or not config.algorithm.adv_norm.mean_leave1out:
        return None
    return (
        "found true, but with algorithm.gae it is the advantages of tokens that are normalised, and one token left out "
        "of their mean is no baseline; set it to false, or leave one out among rewards: "
        "algorithm.reward_norm.mean_leave1out"
    )


@rule("algorithm.critic", "num_iterations")
def critic_warmup_ends(config: TrainConfig) -> str | None:
    """algorithm.critic.warmup_iterations is below num_iterations: else the policy is never trained."""
    critic = config.algorithm.critic
    if critic is None or critic.warmup_iterations < config.num_iterations:
        return None
    return (
        f"warmup_iterations={critic.warmup_iterations} of num_iterations={config.num_iterations} train the critic "
        f"alone, so that the policy is never trained; use at most {config.num_iterations - 1}"
    )


@rule("algorithm.critic", "num_iterations", "stack.num_updates_per_batch")
def critic_schedule(config: TrainConfig) -> str | None:
    """The optimizer of the critic keeps the rules of optimizer: two betas, min_lr at most lr, warmup_steps at most its
    steps.
    """
    if config.algorithm.critic is None:
        return None
    optimizer, steps = config.algorithm.critic.optimizer, critic_steps(config)
    if len(optimizer.betas) != 2:
        return f"optimizer.betas: found {len(optimizer.betas)} numbers, expected two: [0.9, 0.999]"
    if optimizer.min_lr > optimizer.lr:
        return f"optimizer.min_lr: found {optimizer.min_lr:g}, expected at most its lr, {optimizer.lr:g}"
    if optimizer.warmup_steps > steps:
        return f"optimizer.warmup_steps: found {optimizer.warmup_steps}, but the critic makes {steps} steps in the run"
    return None
