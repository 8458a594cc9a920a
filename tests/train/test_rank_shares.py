"""One batch dealt to data-parallel ranks: their gradients sum up to those of one process, whatever the deal.

Each rank's share goes through the one real actor, one after the other, as DDP would sum it up.
"""

import pickle
from dataclasses import replace

import pytest
import torch

from tests.train.conftest import make_part
from tests.train.megatron.conftest import assert_gradients_close, make_actor, make_folder  # noqa: F401 - fixtures
from tests.train.megatron.test_critic import make_critic  # noqa: F401 - a fixture
from tests.train.test_stack import uneven_part
from unirl.algorithms import PolicyLossConfig, ValueLossConfig, count_denominators, make_algorithm, merge_metrics
from unirl.config.schema import StackConfig
from unirl.train.critic import CriticTrainer
from unirl.train.log_prob_pass import log_prob_pass
from unirl.train.packing import plan_for
from unirl.train.plan import ParallelShape
from unirl.train.stack import TrainStack

NORM = {"loss_agg_mode": "seq-mean-token-sum-norm", "horizon": 20}
LOSSES = {
    "drpo": PolicyLossConfig(loss="drpo", drpo_epsilon=0.2, **NORM),
    "token-mean, KL and entropy": PolicyLossConfig(
        loss="ppo", eps_clip=0.2, loss_agg_mode="token-mean", kl_coef=0.1, entropy_coef=0.01
    ),
    "seq-mean-token-sum, GSPO": PolicyLossConfig(
        loss="ppo", eps_clip=0.2, loss_agg_mode="seq-mean-token-sum", importance_sampling_level="sequence"
    ),
    "seq-mean-token-mean, recomputed anchor": PolicyLossConfig(
        loss="ppo", eps_clip=0.2, loss_agg_mode="seq-mean-token-mean", old_logp_source="recompute", kl_coef=0.1
    ),
}
ONE_PROCESS = ParallelShape()
LAYOUTS = {
    "dp2": (ParallelShape(dp=2), {"micro_batch_tokens": 17}),
    "dp3, padded": (ParallelShape(3, 4, 8, 2), {"micro_batch_tokens": 30}),
    "dp4, shared prompts": (ParallelShape(4, 2, 2, 1), {"share_prompts": True}),
    "more ranks than samples": (ParallelShape(12), {}),
}


class RankByRank:
    """The real actor or critic with the shares of several ranks: runs them one after the other and sums gradients."""

    def __init__(self, model, shape: ParallelShape):
        self.model, self.shape, self.cost = model, shape, model.cost

    def __getattr__(self, name):
        return getattr(self.model, name)

    def shares(self, micro_batches):
        assert len(micro_batches) % self.shape.dp == 0
        count = len(micro_batches) // self.shape.dp
        assert count % self.shape.count_multiple == 0
        return [micro_batches[rank * count : (rank + 1) * count] for rank in range(self.shape.dp)]

    def log_probs(self, micro_batches):
        return [found for share in self.shares(micro_batches) for found in self.model.log_probs(share)]

    def values(self, micro_batches):
        return [found for share in self.shares(micro_batches) for found in self.model.values(share)]

    def forward_backward(self, micro_batches, loss_fn):
        loss_fn = pickle.loads(pickle.dumps(loss_fn))  # it goes to other processes
        metrics, total = [], None
        parameters = list(self.model.model.parameters())
        for share in self.shares(micro_batches):
            metrics += self.model.forward_backward(share, loss_fn)
            found = [p.main_grad.clone() for p in parameters]
            total = found if total is None else [one + other for one, other in zip(total, found, strict=True)]
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.main_grad.copy_(gradient)
        return metrics


@pytest.fixture
def train(make_folder, make_actor):  # noqa: F811
    """Gradients before the first step and metrics of a fresh actor under a layout."""
    folder, _ = make_folder("qwen3-tied")

    def run(part, loss, shape=ONE_PROCESS, **stack):
        actor = RankByRank(make_actor(folder, lr=1e-2), shape)
        gradients = []
        step = actor.model.optimizer_step
        actor.optimizer_step = lambda: (gradients.append({n: g.clone() for n, g in actor.gradients()}), step())[1]
        metrics = TrainStack(actor, make_algorithm(LOSSES[loss]), StackConfig(**stack)).train_track(part)
        return gradients[0], metrics

    return run


@pytest.mark.parametrize("loss", LOSSES)
def test_ranks_together_have_the_gradient_of_one_process(train, loss):
    part = replace(uneven_part(), ref_logp=uneven_part().text.log_probs - 0.1)
    whole, metrics = train(part, loss)
    for shape, stack in LAYOUTS.values():
        split, split_metrics = train(part, loss, shape, **stack)
        assert_gradients_close(split, whole)
        assert split_metrics["trained_fraction"] == metrics["trained_fraction"]
        for name in ("loss", "grad_norm", "ratio_mean", "ratio_max", "approx_kl", "entropy"):
            assert split_metrics[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), (shape, name)
        if LOSSES[loss].old_logp_source == "recompute":
            assert split_metrics["approx_kl_abs"] == 0, "the anchor is recomputed over the very micro-batches"


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("counts", "shape", "budget"), [((1, 7), ONE_PROCESS, 9), ((3, 13), ParallelShape(dp=2), 20)])
def test_a_mean_over_unequal_shares_is_that_of_all_tokens(train, loss, counts, shape, budget):
    """Two samples, in two micro-batches of one rank or on two ranks; a mean of the shares' means would be another."""
    part = make_part([([3, 1], [list(range(10, 10 + count)) for count in counts])], rewards=[1.0, 0.0])
    part = replace(part, ref_logp=part.text.log_probs - 0.1)
    whole, metrics = train(part, loss)
    split, split_metrics = train(part, loss, shape, micro_batch_tokens=budget)
    assert split_metrics["plan/micro_batches"] * shape.dp == 2
    assert_gradients_close(split, whole)
    assert split_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-5)


def test_later_updates_are_the_same_too(train):
    """Whose anchors are computed in one pass over the plans of all updates."""
    loss = "seq-mean-token-mean, recomputed anchor"
    part = replace(uneven_part(), ref_logp=uneven_part().text.log_probs - 0.1)
    _, metrics = train(part, loss, num_updates_per_batch=2)
    _, split = train(part, loss, ParallelShape(dp=3, count_multiple=2), num_updates_per_batch=2)
    assert split["optimizer_steps"] == 2
    assert split["plan/micro_batches"] == 2
    for name in ("loss", "grad_norm", "approx_kl_abs", "ratio_max"):
        assert split[name] == pytest.approx(metrics[name], rel=1e-3)


def test_log_probs_come_back_to_their_tokens(make_folder, make_actor):  # noqa: F811
    """With the logits in chunks as well, of which an empty micro-batch has none."""
    folder, _ = make_folder("qwen3-tied")
    part = uneven_part()
    for chunk in (None, 3):
        actor = make_actor(folder, logits_chunk_tokens=chunk)
        whole = log_prob_pass(actor, part, StackConfig())
        for shape, stack in LAYOUTS.values():
            found = log_prob_pass(RankByRank(actor, shape), part, StackConfig(**stack))
            torch.testing.assert_close(found, whole, atol=1e-5, rtol=0)


def test_a_critic_under_ranks_has_the_values_and_the_step_of_one_process(make_folder, make_critic):  # noqa: F811
    folder, _ = make_folder()
    found = []
    for shape in (ParallelShape(), ParallelShape(3, 4, 8, 2), ParallelShape(12)):
        critic = CriticTrainer(RankByRank(make_critic(folder, lr=1e-2), shape), ValueLossConfig(), StackConfig())
        part = critic.with_values(uneven_part())
        part = replace(part, returns=part.text.loss_mask.float())
        plan = plan_for(critic.critic, part, torch.arange(len(part)), StackConfig())
        metrics, step = critic.step(plan, count_denominators(part.text.loss_mask, part.text.cu_seqlens))
        found.append((part.values, merge_metrics(metrics)["value_loss"], step.grad_norm))
    for values, loss, grad_norm in found[1:]:
        torch.testing.assert_close(values, found[0][0], atol=1e-5, rtol=0)
        assert (loss, grad_norm) == pytest.approx(found[0][1:], rel=1e-4)
