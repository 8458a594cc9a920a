"""Train a model on the same batches under one layout of ranks, and gather all that must not depend on the layout."""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from unirl.algorithms import PolicyLossConfig, make_algorithm
from unirl.cluster.spawn import run_ranks
from unirl.config.schema import CriticConfig, ModelConfig, OptimizerConfig, ParallelConfig, StackConfig
from unirl.train.critic import CriticTrainer
from unirl.train.log_prob_pass import log_prob_pass
from unirl.train.megatron.actor import MegatronActor
from unirl.train.megatron.critic import MegatronCritic
from unirl.train.megatron.weights import iterate_weights
from unirl.train.packing import MicroBatch, plan_for
from unirl.train.stack import TrainStack
from unirl.types import Part

LEARNING_RATE = 1e-3
EPSILON_OF_CLIP = 0.02


def audit_optimizer(stack: StackConfig, **keys) -> OptimizerConfig:
    """AdamW whose steps magnify rounding by a known factor at most.

    AdamW divides a gradient by its own size, so that with the usual epsilon an entry that is all rounding moves its
    weight by the whole learning rate. An update m / (sqrt(v) + eps) changes by 2 d / eps at most where gradients change
    by d. Gradients are clipped to the norm G; with d = 1e-5 G, eps = 0.02 G and this learning rate, 1e-3, weights of
    layouts part by 1e-6 a step at most, while they move by up to 1e-3.
    """
    epsilon = EPSILON_OF_CLIP * stack.max_grad_norm
    return OptimizerConfig(**{"weight_decay": 0.1, **keys, "lr": LEARNING_RATE, "eps": epsilon})


@dataclass(frozen=True)
class ParallelCase:
    """What is trained: one rollout batch after the other, `parts`, from the weights of `model.path`.

    parts: with rewards, advantages and all that the loss needs. Their `log_probs` and `ref_logp` are added to the
        log-probs that the policy itself has when the part's turn comes: zeros make it on-policy.
    other_tokens: that pass has another token budget for its micro-batches than the training (`stack`) has.
    critic: trained beside the policy; its `path` as in a recipe, its optimizer is not read.
    """

    name: str
    model: ModelConfig
    algorithm: PolicyLossConfig
    parts: list[Part]
    other_tokens: int
    stack: StackConfig = field(default_factory=StackConfig)
    critic: CriticConfig | None = None
    temperature: float = 1.0
    seed: int = 0
    optimizer: OptimizerConfig | None = None

    @property
    def num_steps(self) -> int:
        """Optimizer steps, of the policy and of the critic."""
        return len(self.parts) * self.stack.num_updates_per_batch


@dataclass(frozen=True)
class Outcome:
    """What a layout makes of a case.

    token_values: by name, [T] float32 over the tokens of the first part, before the first step: log-probs and entropies
        (nats), in the micro-batches of training and in those of `other_tokens`, `values` of a critic; NaN on tokens
        that are not generated.
    metrics: of each part, as `TrainStack` reports them, but for those of the plan, which depend on the layout.
    gradients, weights: by Hugging Face name, those of the critic after `critic.`, float32: of the first step (as
        clipped), and after the last one.
    ranks_agree: whether all ranks report the same metrics and all replicas have the same weights, to the bit.
    """

    token_values: dict[str, torch.Tensor]
    metrics: list[dict[str, float]]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    ranks_agree: bool


Job = tuple[ParallelCase, ParallelConfig]
"""What to train, and under which layout."""


def train_jobs(jobs: Sequence[Job], num_ranks: int, *, timeout_s: float = 300.0) -> list[Outcome]:
    """The outcome of each job, one after the other, on `num_ranks` processes, on the CPU.

    One rank runs in this process, unless that would take its GPU. Raises RankError where a rank fails or all is not
    done after `timeout_s` seconds.
    """
    if num_ranks == 1 and not torch.cuda.is_available():
        return _train_all(jobs)
    (found,) = [outcomes for outcomes in run_ranks(_train_all, num_ranks, jobs, timeout_s=timeout_s) if outcomes]
    return found


def _train_all(jobs: Sequence[Job]) -> list[Outcome]:
    return [outcome for outcome in (train(*job) for job in jobs) if outcome is not None]


def train(case: ParallelCase, parallel: ParallelConfig) -> Outcome | None:
    """The outcome, on one of the ranks; None on others. Collective: every rank of the process group runs it."""
    optimizer = case.optimizer or audit_optimizer(case.stack)
    common = {"parallel": parallel, "optimizer": optimizer, "total_steps": case.num_steps, "seed": case.seed}
    with ExitStack() as opened:
        model = MegatronActor(case.model, **common, stack=case.stack, temperature=case.temperature)
        actor, critic = _AllReplicas(opened.enter_context(closing(model))), None
        if case.critic is not None:
            folder = replace(case.model, path=case.critic.path or case.model.path)
            clip = {"max_grad_norm": case.stack.max_grad_norm, "recompute": case.stack.recompute}
            critic = _AllReplicas(opened.enter_context(closing(MegatronCritic(folder, **common, **clip))))
        token_values, metrics = _train(case, actor, critic)
        weights = [_weights(actor), _weights(critic)]
        agree = _all_equal([repr(metrics), *(_digest(some) for some in weights)])
        if not actor.speaks:
            return None
        gradients = [actor.gradients, {} if critic is None else critic.gradients]
        return Outcome(token_values, metrics, _both(*gradients), _both(*weights), agree)


def _train(case: ParallelCase, actor: "_AllReplicas", critic: "_AllReplicas | None"):
    """(token values, metrics of each part)"""
    trainer = None if critic is None else CriticTrainer(critic, case.critic, case.stack)
    algorithm = make_algorithm(case.algorithm)
    stack = TrainStack(actor, algorithm, case.stack, allow_multi_update=True, critic=trainer)
    token_values: dict[str, torch.Tensor] = {}
    metrics = []
    for part in case.parts:
        part = stack.with_values(_anchored(case, actor, part))
        if not token_values:
            token_values = _token_values(case, actor, part)
        found = stack.train_track(part)
        metrics.append(
            {name: found[name] for name in found if not name.startswith("plan/") and found[name] is not None}
        )
    return token_values, metrics


def _anchored(case: ParallelCase, actor: "_AllReplicas", part: Part) -> Part:
    own = log_prob_pass(actor, part, replace(case.stack, micro_batch_tokens=case.other_tokens))
    text = replace(part.text, log_probs=part.text.log_probs + own)
    return replace(part, text=text, ref_logp=None if part.ref_logp is None else part.ref_logp + own)


def _token_values(case: ParallelCase, actor: "_AllReplicas", part: Part) -> dict[str, torch.Tensor]:
    found = {} if part.values is None else {"values": torch.where(part.text.loss_mask, part.values, math.nan)}
    for label, tokens in (("", case.stack.micro_batch_tokens), (", packed otherwise", case.other_tokens)):
        plan = plan_for(actor, part, torch.arange(len(part)), replace(case.stack, micro_batch_tokens=tokens))
        logp, entropy = (torch.full_like(part.text.log_probs, math.nan) for _ in range(2))
        for batch, values in zip(plan, actor.log_probs(plan), strict=True):
            logp[batch.token_positions], entropy[batch.token_positions] = values
        found |= {f"logp{label}": logp, f"entropy{label}": entropy}
    return found


class _AllReplicas:
    """A hosted model as the driver of all ranks sees it: takes the micro-batches of all replicas, of which this rank
    runs its own, and returns the results of all of them, on every rank.

    gradients: of the first step, as clipped; {} but on the rank that speaks for all.
    """

    def __init__(self, host: MegatronActor | MegatronCritic):
        self.host = host
        self.shape, self.cost = host.shape, host.cost
        self.speaks = host.reports and host.dp_rank == 0
        self.gradients: dict[str, torch.Tensor] = {}
        self._has_stepped = False

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list:
        return self._of_all(self.host.log_probs(self._own(micro_batches)))

    def values(self, micro_batches: Sequence[MicroBatch]) -> list:
        return self._of_all(self.host.values(self._own(micro_batches)))

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss_fn: Callable) -> list:
        return self._of_all(self.host.forward_backward(self._own(micro_batches), loss_fn))

    def optimizer_step(self):
        step = self.host.optimizer_step()
        if not self._has_stepped:
            self.gradients = self.named(self.host.gradients(), lambda parameter: parameter.main_grad)
            self._has_stepped = True
        return step

    def named(self, pairs: Iterable[tuple[str, torch.Tensor]], of_parameter: Callable) -> dict[str, torch.Tensor]:
        """By name, float32, on the last pipeline stage with the head of a critic, which Hugging Face has no names for;
        {} on ranks that report nothing.
        """
        found = {}
        for name, tensor in pairs:  # collective: every rank runs it to its end
            if self.host.reports:
                found[name] = tensor.float().cpu().clone()
        if self.host.reports and isinstance(self.host, MegatronCritic):
            for name, parameter in self.host.model.value_head.named_parameters():
                found[f"value_head.{name}"] = of_parameter(parameter).detach().float().cpu().clone()
        return found

    def _own(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        count = len(micro_batches) // self.shape.dp
        return micro_batches[self.host.dp_rank * count : (self.host.dp_rank + 1) * count]

    def _of_all(self, results: list) -> list:
        """Results of every replica's rank that reports, replica after replica."""
        found = _gather((self.host.dp_rank, results) if self.host.reports else None)
        by_replica = dict(pair for pair in found if pair is not None)
        return [result for replica in range(self.shape.dp) for result in by_replica[replica]]


def _weights(model: _AllReplicas | None) -> dict[str, torch.Tensor]:
    return {} if model is None else model.named(iterate_weights(model.host.chunks), lambda parameter: parameter)


def _digest(tensors: dict[str, torch.Tensor]) -> str | None:
    """None of nothing."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().cpu().numpy())
    return digest.hexdigest() if tensors else None


def _all_equal(own: list[str | None]) -> bool:
    """Whether all ranks have the same in each place, None apart."""
    return all(len({value for value in place if value is not None}) <= 1 for place in zip(*_gather(own), strict=True))


def _gather(own) -> list:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def _both(policy: dict[str, torch.Tensor], critic: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return policy | {f"critic.{name}": tensor for name, tensor in critic.items()}
