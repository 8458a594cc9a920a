"""Config of losses and advantages: plain dataclasses and their rules, importable without torch."""

import math
from dataclasses import MISSING, dataclass, fields
from typing import Any

from unirl.algorithms.validation import key_problems
from unirl.utils.keys import key

GAE_LAMBDAS = {"vapo_length_adaptive": "alpha", "relative_position": "q"}
"""Built-in lambdas by name, and the argument that each takes."""

AGGREGATION_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass
class NormConfig:
    """How values of one kind (rewards, advantages), one per sample, are normalised."""

    mean_level: str | None = key("batch", "Level of the mean subtracted; null: none.", choices=["batch", "group"])
    std_level: str | None = key("batch", "Level of the std that divides; null: none.", choices=["batch", "group"])
    mean_leave1out: bool = key(False, "Leave the value itself out of its mean (RLOO).")
    std_unbiased: bool = key(True, "Divide the variance by n - 1.")
    eps: float = key(1e-5, "Added to the std.", gt=0)
    group_size: int | None = key(None, "Group size where values carry no group ids.", ge=1)


@dataclass
class RejectionConfig:
    """Which tokens or sequences are dropped, or how their behaviour weights are clamped (decoupled loss only).

    The metric compares the proximal with the rollout policy; what lies outside [lower, upper] is acted on.
    """

    level: str = key("token", "Judge each token, or each sequence as a whole.", choices=["token", "sequence"])
    metric: str = key(
        "ratio",
        "What is compared with the bounds.",
        choices=["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"],
    )
    action: str = key(
        "mask", "Drop what is outside the bounds, or clamp its weight (metric ratio only).", choices=["mask", "clamp"]
    )
    agg: str = key(
        "mean", "How a sequence's token metrics become one (level sequence).", choices=["sum", "mean", "max"]
    )
    lower: float | None = key(None, "Lower bound; null: none.")
    upper: float | None = key(None, "Upper bound, above 1 for metric ratio; must be given.")


@dataclass
class PolicyLossConfig:
    """Which policy loss, and its constants. A constant that the chosen loss does not have is not read."""

    loss: str = key(
        "drpo", "Loss on the ratio of policy to anchor.", choices=["ppo", "drpo", "spo", "dppo", "sapo", "cispo"]
    )
    eps_clip: float = key(0.2, "Ratio clip below 1, and above 1 without eps_clip_higher (ppo, cispo).", ge=0)
    eps_clip_higher: float | None = key(None, "Ratio clip above 1; null or 0: eps_clip (ppo; cispo needs it).", ge=0)
    c_clip: float | None = key(None, "Dual clip: the loss of a token is at most c_clip |A| (ppo); null: none.", gt=1)
    drpo_epsilon: float = key(12.5, "Shift of a token's probability at which the pull back balances the push.", gt=0)
    spo_epsilon: float = key(0.2, "Shift of the ratio at which the pull back balances the push (spo).", gt=0)
    dppo_delta: float = key(0.15, "Shift of a token's probability beyond which it is not pushed on (dppo).", gt=0)
    sapo_tau_pos: float = key(1.0, "Temperature of the soft gate where A > 0 (sapo).", gt=0)
    sapo_tau_neg: float = key(1.05, "Temperature of the soft gate where A <= 0 (sapo).", gt=0)
    importance_sampling_level: str = key(
        "token", "Ratio of each token, or one per sequence: the geometric mean (GSPO).", choices=["token", "sequence"]
    )
    old_logp_source: str = key(
        "rollout",
        "Anchor of the ratio: the rollout's own log-probs, or those of the policy before the update, recomputed.",
        choices=["rollout", "recompute"],
    )
    use_decoupled_loss: bool = key(
        False, "Anchor the ratio on the proximal policy and weight tokens by proximal over rollout probability."
    )
    rejection_sampling: RejectionConfig | None = key(
        None, "Filter on the distance of the proximal from the rollout policy (decoupled loss only)."
    )
    loss_agg_mode: str = key(
        "token-mean",
        "How token losses become one number.",
        choices=AGGREGATION_MODES,
    )
    horizon: int | None = key(
        None, "Constant that divides a sequence's sum (seq-mean-token-sum-norm), usually sampling.max_new_tokens.", gt=0
    )
    entropy_coef: float = key(0.0, "Weight of the entropy bonus.", ge=0)
    kl_coef: float = key(0.0, "Weight of the KL to the reference policy in the loss.", ge=0)
    kl_estimator: str = key(
        "k3", "Estimator of the KL to the reference policy, in loss and reward.", choices=["k1", "k2", "k3"]
    )


@dataclass
class ValueLossConfig:
    """The loss of a critic."""

    value_clip: float | None = key(
        0.5, "A value's loss stops falling once it has moved so far from the old value; null: no clipping.", gt=0
    )
    loss_agg_mode: str = key("token-mean", "How token losses become one number.", choices=AGGREGATION_MODES)
    horizon: int | None = key(None, "Constant that divides a sequence's sum (seq-mean-token-sum-norm).", gt=0)


@dataclass
class GAEConfig:
    """Generalised advantage estimation."""

    discount: float = key(1.0, "Discount per step.", ge=0, le=1)
    gae_lambda: float | str = key(
        1.0,
        "A number, vapo_length_adaptive, relative_position, or the dotted path of a callable(num_steps, **kwargs).",
    )
    gae_lambda_kwargs: dict[str, Any] = key(factory=dict, doc="Arguments of a lambda given by name: alpha, q, ...")
    gae_timestep_unit: str = key("token", "What one step is.", choices=["token", "turn"])
    bootstrap_truncated: bool = key(
        True,
        "A truncated sequence goes on as its last value says; false: it ends like any other. Use false where most "
        "sequences are truncated: the last value is then part of its own target and drifts.",
    )


@dataclass
class OverlongConfig:
    """Soft penalty on responses that come close to the longest length (DAPO)."""

    overlong_tokens: int = key(MISSING, "Length of the penalty zone that ends at max_new_tokens.", ge=1)
    max_new_tokens: int = key(MISSING, "Longest response in tokens.", ge=1)
    overlong_penalty_factor: float = key(1.0, "Penalty at max_new_tokens.", ge=0)


@dataclass
class StepAdvantageConfig:
    """How the advantage of an episode is shared out over its steps."""

    step_adv_const_length: float | None = key(None, "Divide by this constant; null: by the steps of the episode.", gt=0)


def loss_config_problems(config: PolicyLossConfig) -> list[str]:
    """What is wrong with a policy-loss config, one plain message a rule; empty where it is sound."""
    # The config of a trainer's algorithm has further keys, which are not this function's to judge.
    if problems := key_problems(config, fields(PolicyLossConfig)):
        return problems
    problems += _aggregation_problems(config)
    if config.loss == "cispo":
        if not config.eps_clip_higher:
            problems.append(
                f"eps_clip_higher: found {config.eps_clip_higher}, expected a number > 0: loss cispo needs it"
            )
        if config.importance_sampling_level != "token":
            problems.append("importance_sampling_level: loss cispo weights single tokens; set it to token")
    if config.loss == "sapo" and config.use_decoupled_loss:
        problems.append("use_decoupled_loss: loss sapo gates the ratio to the rollout policy; set it to false")
    if config.use_decoupled_loss and config.old_logp_source == "recompute":
        problems.append(
            "old_logp_source: use_decoupled_loss compares recomputed with rollout log-probs and needs both; set it to "
            "rollout, or use_decoupled_loss to false"
        )
    if config.rejection_sampling is not None:
        if not config.use_decoupled_loss:
            problems.append(
                "rejection_sampling: it compares proximal and rollout policy, and only the decoupled loss has both; "
                "set use_decoupled_loss to true or rejection_sampling to null"
            )
        problems += _rejection_problems(config.rejection_sampling)
    return problems


def value_loss_config_problems(config: ValueLossConfig) -> list[str]:
    """The same for the config of a critic's loss."""
    return key_problems(config, fields(ValueLossConfig)) or _aggregation_problems(config)


def gae_config_problems(config: GAEConfig) -> list[str]:
    """The same for the config of the advantage estimation; a dotted path is not imported."""
    if problems := key_problems(config):
        return problems
    gae_lambda, arguments = config.gae_lambda, sorted(config.gae_lambda_kwargs)
    if not isinstance(gae_lambda, str):
        if not 0 <= gae_lambda <= 1:
            problems.append(f"gae_lambda: found {gae_lambda}, expected a number from 0 to 1, or a name")
        if arguments:
            problems.append(f"gae_lambda_kwargs: found {arguments}, but the lambda is a number; leave them out")
    elif gae_lambda in GAE_LAMBDAS:
        problems += _built_in_lambda_problems(gae_lambda, config.gae_lambda_kwargs)
    elif "." not in gae_lambda:
        problems.append(
            f"gae_lambda: found {gae_lambda!r}, expected a number, one of {', '.join(GAE_LAMBDAS)}, or the dotted path "
            "of a callable(num_steps, **gae_lambda_kwargs)"
        )
    return problems


def _built_in_lambda_problems(name: str, arguments: dict[str, Any]) -> list[str]:
    argument = GAE_LAMBDAS[name]
    if list(arguments) != [argument]:
        return [f"gae_lambda_kwargs: found {sorted(arguments)}, but {name} takes [{argument!r}]"]
    value = arguments[argument]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if argument == "alpha" and not (is_number and 0 < value < math.inf):
        return [f"gae_lambda_kwargs.alpha: found {value!r}, expected a number > 0"]
    if argument == "q" and not (is_number and 0 <= value <= 1):
        return [f"gae_lambda_kwargs.q: found {value!r}, expected a number from 0 to 1"]
    return []


def _aggregation_problems(config: PolicyLossConfig | ValueLossConfig) -> list[str]:
    if config.loss_agg_mode != "seq-mean-token-sum-norm" or config.horizon is not None:
        return []
    return ["horizon: found null, expected a number > 0: loss_agg_mode seq-mean-token-sum-norm divides by it"]


def _rejection_problems(rejection: RejectionConfig) -> list[str]:
    prefix = "rejection_sampling."
    lower, upper = rejection.lower, rejection.upper
    if problems := key_problems(rejection, prefix=prefix):
        return problems
    if upper is None:
        return [f"{prefix}upper: found null, expected a number"]
    if rejection.metric == "ratio":
        if upper <= 1:
            problems.append(f"{prefix}upper: found {upper}, expected > 1 for metric ratio: equal policies have ratio 1")
        if lower is not None and lower <= 0:
            problems.append(f"{prefix}lower: found {lower}, expected > 0 for metric ratio, or null for no lower bound")
    elif upper <= 0:
        problems.append(f"{prefix}upper: found {upper}, expected > 0: equal policies have KL 0")
    if lower is not None and lower >= upper:
        problems.append(f"{prefix}lower: found {lower}, expected less than upper, {upper}")
    if rejection.action == "clamp" and rejection.metric != "ratio":
        problems.append(f"{prefix}action: clamp acts on weights, so it needs metric ratio, found {rejection.metric}")
    return problems


def required_inputs(config: PolicyLossConfig) -> tuple[str, ...]:
    """Arguments of `policy_loss`, beside the ones that are always there, that this config needs."""
    needs = {
        "prox_logp": config.use_decoupled_loss or config.old_logp_source == "recompute",
        "ref_logp": config.kl_coef > 0,
        "entropy": config.entropy_coef > 0,
    }
    return tuple(name for name, needed in needs.items() if needed)
