"""What losses and advantages are, one token after the other: plain loops in float64 over one sequence at a time.

Nothing here is taken from the package. Only `logp`, and `entropy`, are tensors, so that autograd gives the gradients.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

import torch


def policy_loss(config: dict, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a batch, 0-dim float64, with graph."""
    sequences = _sequences(inputs)
    tokens = sum(len(sequence) for sequence in sequences)
    total = torch.zeros((), dtype=torch.float64)
    for sequence in sequences:
        losses = _sequence_losses(config, sequence)
        match config.get("loss_agg_mode", "token-mean"):
            case "token-mean":
                total = total + sum(losses) / tokens
            case "seq-mean-token-sum":
                total = total + sum(losses) / len(sequences)
            case "seq-mean-token-mean":
                total = total + sum(losses) / len(sequence) / len(sequences)
            case "seq-mean-token-sum-norm":
                total = total + sum(losses) / config["horizon"] / len(sequences)
    return total


def _sequences(inputs: dict[str, torch.Tensor]) -> list[list[dict]]:
    """The unmasked tokens of each sequence that has any."""
    bounds = inputs["cu_seqlens"].tolist()
    names = [name for name in inputs if name not in ("cu_seqlens", "loss_mask")]
    sequences = [
        [
            {name: inputs[name][t] if name in ("logp", "entropy") else inputs[name][t].item() for name in names}
            for t in range(start, end)
            if inputs["loss_mask"][t]
        ]
        for start, end in pairwise(bounds)
    ]
    return [sequence for sequence in sequences if sequence]


def _sequence_losses(config: dict, sequence: list[dict]) -> list[torch.Tensor]:
    decoupled = config.get("use_decoupled_loss", False)
    anchors = [token["prox_logp" if decoupled else "old_logp"] for token in sequence]
    log_ratios = [token["logp"] - anchor for token, anchor in zip(sequence, anchors, strict=True)]
    advantages = [token["advantages"] for token in sequence]
    if config.get("importance_sampling_level") == "sequence":
        log_ratios = [sum(log_ratios) / len(sequence)] * len(sequence)
        advantages = [sum(advantages) / len(sequence)] * len(sequence)
    weights = _behaviour_weights(config, sequence) if decoupled else [1.0] * len(sequence)
    losses = []
    for token, anchor, log_ratio, advantage, weight in zip(
        sequence, anchors, log_ratios, advantages, weights, strict=True
    ):
        ratio = torch.exp(_clip(log_ratio, -20, 20))
        loss = weight * _surrogate(config, token, anchor, ratio, advantage) if weight is not None else 0.0
        if config.get("kl_coef"):
            x = token["logp"] - token["ref_logp"]
            loss += config["kl_coef"] * _estimate(config.get("kl_estimator", "k3"), x)
        if config.get("entropy_coef"):
            loss -= config["entropy_coef"] * token["entropy"]
        losses.append(loss)
    return losses


def _surrogate(config: dict, token: dict, anchor: float, r: torch.Tensor, a: float):
    match config["loss"]:
        case "ppo":
            loss = max(-a * r, -a * _clip(r, *_clip_range(config)))
            return min(loss, config["c_clip"] * abs(a)) if config.get("c_clip") else loss
        case "drpo":
            return -a * r + abs(a) * math.exp(token["old_logp"]) * (r - 1) ** 2 / (2 * config["drpo_epsilon"])
        case "spo":
            return -a * r + abs(a) * (r - 1) ** 2 / (2 * config["spo_epsilon"])
        case "dppo":
            shift = abs(token["logp"].exp().item() - math.exp(anchor))
            return 0.0 * r if a * (r.item() - 1) > 0 and shift > config["dppo_delta"] else -a * r
        case "sapo":
            tau = config["sapo_tau_pos"] if a > 0 else config["sapo_tau_neg"]
            return -a * (4 / tau) / (1 + torch.exp(-tau * (r - 1)))
        case "cispo":
            return -a * token["logp"] * _clip(r.item(), *_clip_range(config))


def _clip_range(config: dict) -> tuple[float, float]:
    eps_clip = config.get("eps_clip", 0.2)
    return 1 - eps_clip, 1 + (config.get("eps_clip_higher") or eps_clip)


def _clip(x, lowest: float, highest: float):
    """A constant outside the bounds, so that no gradient passes there."""
    if x < lowest:
        return torch.tensor(float(lowest), dtype=torch.float64) if isinstance(x, torch.Tensor) else lowest
    if x > highest:
        return torch.tensor(float(highest), dtype=torch.float64) if isinstance(x, torch.Tensor) else highest
    return x


def _behaviour_weights(config: dict, sequence: list[dict]) -> list[float | None]:
    """The weight of each token; None where it is rejected."""
    distances = [token["prox_logp"] - token["old_logp"] for token in sequence]
    weights = [math.exp(d) for d in distances]
    rejection = config.get("rejection_sampling")
    if rejection is None:
        return weights
    aggregate = {"sum": sum, "mean": statistics.fmean, "max": max}[rejection.get("agg", "mean")]
    lower, upper = rejection.get("lower"), rejection["upper"]
    lower = -math.inf if lower is None else lower
    if rejection["metric"] == "ratio":
        found = weights
        if rejection["level"] == "sequence":
            found = [math.exp(aggregate(distances))] * len(sequence)
            weights = [math.exp(statistics.fmean(distances))] * len(sequence)
    else:
        found = [_divergence(rejection["metric"], token["prox_logp"], token["old_logp"]) for token in sequence]
        if rejection["level"] == "sequence":
            found = [aggregate(found)] * len(sequence)
    if rejection["action"] == "clamp":
        return [min(max(weight, lower), upper) for weight in weights]
    return [weight if lower <= value <= upper else None for weight, value in zip(weights, found, strict=True)]


def _divergence(metric: str, prox: float, old: float) -> float:
    if metric == "binary_kl":
        p, q = math.exp(prox), math.exp(old)
        return max(_bernoulli_kl(p, q), _bernoulli_kl(q, p))
    return _estimate(metric.removeprefix("kl_"), torch.tensor(prox - old, dtype=torch.float64)).item()


def _bernoulli_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def _estimate(estimator: str, d: torch.Tensor) -> torch.Tensor:
    return {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[estimator]


def normalize(config: dict, values: Sequence[float], group_ids: Sequence[int]) -> list[float]:
    """One value after the other, from the members of its levels."""

    def members(i: int, level: str) -> list[int]:
        return [j for j in finite if level == "batch" or group_ids[j] == group_ids[i]]

    finite = [i for i, value in enumerate(values) if math.isfinite(value)]
    results = [0.0] * len(values)
    for i in finite:
        result = values[i]
        if level := config.get("mean_level", "batch"):
            others = [j for j in members(i, level) if not (config.get("mean_leave1out") and j == i)] or [i]
            result -= statistics.fmean(values[j] for j in others)
        if level := config.get("std_level", "batch"):
            spread = statistics.stdev if config.get("std_unbiased", True) else statistics.pstdev
            around = [values[j] for j in members(i, level)]
            result = result / (spread(around) + config.get("eps", 1e-5)) if len(around) >= 2 else 0.0
        results[i] = result
    return results


def gae(config: dict, inputs: dict[str, torch.Tensor]) -> tuple[list[float], list[float]]:
    """Advantages and returns: each sequence's steps from the last one back."""
    data = {name: tensor.tolist() for name, tensor in inputs.items()}
    size, by_turn = len(data["values"]), config.get("gae_timestep_unit") == "turn"
    advantages, returns = [0.0] * size, [0.0] * size
    for n, truncated in enumerate(data["truncated"]):
        tokens = [t for t in range(data["cu_seqlens"][n], data["cu_seqlens"][n + 1]) if data["loss_mask"][t]]
        steps = [[t] for t in tokens]
        if by_turn:
            turns = sorted({data["turn_ids"][t] for t in tokens})
            steps = [[t for t in tokens if data["turn_ids"][t] == turn] for turn in turns]
        decay = config.get("discount", 1.0) * gae_lambda(config, len(steps))
        value_after = data["values"][steps[-1][0]] if truncated and steps else 0.0
        advantage_after = 0.0
        for step in reversed(steps):
            value = data["values"][step[0]]
            reward = sum(data["task_rewards"][t] for t in step) + (0.0 if by_turn else data["kl_rewards"][step[0]])
            advantage_after = reward + config.get("discount", 1.0) * value_after - value + decay * advantage_after
            value_after = value
            for t in step:
                advantages[t] = advantage_after + (data["kl_rewards"][t] if by_turn else 0.0)
                returns[t] = advantage_after + value
    return advantages, returns


def gae_lambda(config: dict, num_steps: int) -> float:
    """Of a sequence of so many steps; a dotted path stands for one half to the power of them."""
    found, arguments = config.get("gae_lambda", 1.0), config.get("gae_lambda_kwargs", {})
    if not isinstance(found, str):
        return found
    if found == "vapo_length_adaptive":
        return max(0.0, 1 - 1 / (arguments["alpha"] * num_steps)) if num_steps else 0.0
    if found == "relative_position":
        return arguments["q"] ** (1 / (num_steps - 1)) if num_steps > 1 else float(num_steps)
    return half_to_the(num_steps, **arguments)


def half_to_the(num_steps: int, scale: float = 1.0) -> float:
    """A lambda of the user's own."""
    return 0.5 ** (scale * num_steps)


def token_logprob(logits: list[list[float]], targets: list[int], temperature: float) -> list[tuple[float, float]]:
    """(log-prob, entropy) of each row."""
    found = []
    for row, target in zip(logits, targets, strict=True):
        scaled = [logit / temperature for logit in row]
        peak = max(scaled)
        total = peak + math.log(math.fsum(math.exp(logit - peak) for logit in scaled))
        logps = [logit - total for logit in scaled]
        found.append((logps[target], -math.fsum(math.exp(logp) * logp for logp in logps)))
    return found


def overlong_penalty(config: dict, rewards: list[float], lengths: list[int]) -> list[float]:
    zone, longest = config["overlong_tokens"], config["max_new_tokens"]
    factor = config.get("overlong_penalty_factor", 1.0)
    shares = [min(max(0, length - (longest - zone)), zone) / zone for length in lengths]
    return [reward - factor * share for reward, share in zip(rewards, shares, strict=True)]
