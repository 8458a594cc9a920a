"""Sampling, loss, advantages, reward shaping and optimizer."""

import re

from unirl.config.catalog import nearest
from unirl.config.rules.rule import rule
from unirl.config.schema import GROUP_FILTERS, TrainConfig


@rule("sampling.temperature")
def training_samples_at_random(config: TrainConfig) -> str | None:
    """sampling.temperature > 0: greedy samples are all alike and have no log-probs to train on."""
    if config.sampling.temperature > 0:
        return None
    return "found 0, expected a value > 0: greedy samples are all alike; eval.temperature=0 evaluates greedily"


@rule("algorithm.temperature", "sampling.temperature")
def one_temperature(config: TrainConfig) -> str | None:
    """algorithm.temperature equals sampling.temperature: else the ratio of policy to rollout policy is wrong."""
    if config.algorithm.temperature == config.sampling.temperature:
        return None
    return (
        f"found {config.algorithm.temperature}, but samples are drawn at sampling.temperature="
        f"{config.sampling.temperature}: log-probs must be of the same distribution; leave algorithm.temperature unset"
    )


@rule("sampling.top_p", "sampling.replay_support")
def whole_nucleus(config: TrainConfig) -> str | None:
    """sampling.top_p = 1: a narrowed support changes the sampler's log-probs and not the policy's, unless
    sampling.replay_support narrows these as well.
    """
    if config.sampling.top_p == 1 or config.sampling.replay_support:
        return None
    return f"found {config.sampling.top_p}, expected 1: {_NARROWED}"


@rule("sampling.top_k", "sampling.replay_support")
def all_tokens(config: TrainConfig) -> str | None:
    """sampling.top_k is off (-1), for the same reason."""
    if config.sampling.top_k < 1 or config.sampling.replay_support:
        return None
    return f"found {config.sampling.top_k}, expected -1 (off): {_NARROWED}"


_NARROWED = (
    "training on a narrowed support makes the ratio of policy to rollout policy wrong, unless "
    "sampling.replay_support=true, with a sampling.top_k, narrows the policy in the same way"
)
_WIDEST_SUPPORT = 1024


@rule("sampling.top_k", "sampling.replay_support")
def replayed_support_is_bounded(config: TrainConfig) -> str | None:
    """sampling.top_k is 2 to 1024 where sampling.replay_support is on, with sampling.top_p or without: a nucleus alone
    may be the whole vocabulary.
    """
    top_k = config.sampling.top_k
    if not config.sampling.replay_support or 2 <= top_k <= _WIDEST_SUPPORT:
        return None
    reason = "every sample is greedy, with log-probs of 0" if top_k == 1 else "the support of a token has no such bound"
    return (
        f"found {top_k}, where {reason}; sampling.replay_support=true takes 2 to {_WIDEST_SUPPORT}, and "
        "sampling.top_p may narrow that further"
    )


@rule("stack.loss_kernel", "sampling.replay_support")
def fused_loss_is_of_the_vocabulary(config: TrainConfig) -> str | None:
    """stack.loss_kernel=fused takes no sampling.replay_support: the fused kernel is of the whole vocabulary."""
    if config.stack.loss_kernel != "fused" or not config.sampling.replay_support:
        return None
    return "found fused, which is of the whole vocabulary, with sampling.replay_support=true; use auto or separate"


@rule("algorithm.kl_ctl", "algorithm.kl_coef", "model.reference_path")
def kl_has_a_reference(config: TrainConfig) -> str | None:
    """algorithm.kl_ctl > 0 or algorithm.kl_coef > 0 needs a reference model, model.reference_path."""
    algorithm = config.algorithm
    if config.model.reference_path or algorithm.kl_ctl == algorithm.kl_coef == 0:
        return None
    return (
        f"kl_ctl={algorithm.kl_ctl} and kl_coef={algorithm.kl_coef} weight a KL to the reference policy, and there is "
        "none: set model.reference_path, or both to 0"
    )


@rule("stack.loss_kernel", "algorithm.importance_sampling_level", "algorithm.kl_coef")
def fused_loss_is_of_tokens(config: TrainConfig) -> str | None:
    """stack.loss_kernel=fused takes algorithm.importance_sampling_level=token and algorithm.kl_coef=0 only."""
    level, kl_coef = config.algorithm.importance_sampling_level, config.algorithm.kl_coef
    if config.stack.loss_kernel != "fused" or (level == "token" and kl_coef == 0):
        return None
    return (
        f"found fused, which has neither ratios of whole sequences (algorithm.importance_sampling_level={level}) nor a "
        f"KL to the reference policy (algorithm.kl_coef={kl_coef}); use auto or separate"
    )


@rule("stack.loss_kernel", "stack.logits_chunk_tokens")
def fused_loss_has_logits(config: TrainConfig) -> str | None:
    """stack.loss_kernel=fused needs all logits of a micro-batch: stack.logits_chunk_tokens is null."""
    chunk = config.stack.logits_chunk_tokens
    if config.stack.loss_kernel != "fused" or chunk is None:
        return None
    return f"found fused, which needs stored logits (stack.logits_chunk_tokens={chunk}); use auto or separate"


@rule("stack.num_updates_per_batch", "algorithm.loss", "algorithm.allow_multi_update")
def drpo_updates_once(config: TrainConfig) -> str | None:
    """DRPO anchors its ratio on the rollout's own log-probs, so stack.num_updates_per_batch is 1, unless
    algorithm.allow_multi_update splits the batch into that many disjoint mini-batches.
    """
    updates = config.stack.num_updates_per_batch
    if updates == 1 or config.algorithm.loss != "drpo" or config.algorithm.allow_multi_update:
        return None
    return (
        f"found {updates}, but algorithm.loss=drpo anchors its ratio on the rollout's own log-probs and takes one "
        "update per batch; use 1, or algorithm.allow_multi_update=true for disjoint mini-batches"
    )


@rule("algorithm.dynamic_filter")
def filter_is_known(config: TrainConfig) -> str | None:
    """algorithm.dynamic_filter is null, a built-in name or a dotted path."""
    name = config.algorithm.dynamic_filter
    if name is None or name in GROUP_FILTERS or re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name):
        return None
    return (
        f"found {name!r}, expected one of {', '.join(GROUP_FILTERS)}, the dotted path of a callable, or null; the "
        f"nearest is {nearest(name, list(GROUP_FILTERS))}"
    )


@rule("algorithm.dynamic_filter", "sampling.num_samples")
def filter_has_rewards_to_compare(config: TrainConfig) -> str | None:
    """sampling.num_samples > 1 where algorithm.dynamic_filter is nonzero_variance, which rejects groups of one."""
    if config.algorithm.dynamic_filter != "nonzero_variance" or config.sampling.num_samples > 1:
        return None
    return "nonzero_variance rejects every group of sampling.num_samples=1; use 2 or more samples"


@rule("algorithm.dynamic_bs", "algorithm.dynamic_filter")
def dynamic_batch_has_a_filter(config: TrainConfig) -> str | None:
    """algorithm.dynamic_bs needs algorithm.dynamic_filter."""
    if not config.algorithm.dynamic_bs or config.algorithm.dynamic_filter:
        return None
    return (
        "found true, but without algorithm.dynamic_filter all groups are kept; set "
        f"algorithm.dynamic_filter={GROUP_FILTERS[0]}, or dynamic_bs to false"
    )


@rule("reward.overlong_tokens", "reward.truncated_reward", "sampling.max_new_tokens")
def penalty_zone_fits(config: TrainConfig) -> str | None:
    """reward.overlong_tokens is below sampling.max_new_tokens where truncated_reward is soft."""
    longest = config.sampling.max_new_tokens
    if config.reward.truncated_reward != "soft" or config.reward.overlong_tokens < longest:
        return None
    return (
        f"a penalty zone of {config.reward.overlong_tokens} tokens does not fit before sampling.max_new_tokens="
        f"{longest}; use less than {longest}"
    )


@rule("optimizer.betas")
def two_betas(config: TrainConfig) -> str | None:
    """optimizer.betas are two numbers."""
    found = len(config.optimizer.betas)
    return None if found == 2 else f"found {found} numbers, expected two: [0.9, 0.999]"


@rule("optimizer.min_lr", "optimizer.lr")
def schedule_falls(config: TrainConfig) -> str | None:
    """optimizer.min_lr is at most optimizer.lr."""
    if config.optimizer.min_lr <= config.optimizer.lr:
        return None
    return f"found {config.optimizer.min_lr:g}, expected at most optimizer.lr={config.optimizer.lr:g}"


@rule("eval.num_samples", "eval.temperature")
def greedy_evaluates_once(config: TrainConfig) -> str | None:
    """eval.num_samples is 1 where eval.temperature is 0: greedy samples are all alike."""
    if config.eval.temperature > 0 or config.eval.num_samples == 1:
        return None
    return f"found {config.eval.num_samples}, expected 1: at eval.temperature=0 all samples of a prompt are alike"
