"""Algorithms by the name of their loss, and one optimizer step driven over micro-batches."""

from types import SimpleNamespace

import pytest
import torch

from tests.algorithms.batches import Batch, random_batch
from unirl.algorithms import (
    DRPO,
    PPO,
    Denominators,
    PolicyLossConfig,
    count_denominators,
    make_algorithm,
    merge_metrics,
    policy_loss,
)

LOSS_NAMES = [*PolicyLossConfig.__dataclass_fields__["loss"].metadata["choices"]]


class BiasActor:
    """A policy with one parameter, a shift of every log-prob, that accumulates its gradient as an actor does."""

    def __init__(self):
        self.shift = torch.zeros((), dtype=torch.float64, requires_grad=True)

    def forward_backward(self, micro_batches, loss_fn):
        results = []
        for batch in micro_batches:
            loss, metrics = loss_fn(batch, batch.logp + self.shift, batch.entropy)
            loss.backward()
            results.append(metrics)
        return results


def micro_batch(batch: Batch) -> SimpleNamespace:
    return SimpleNamespace(
        logp=batch.logp,
        entropy=batch.entropy,
        old_logp=batch.old_logp,
        advantages=batch.advantages,
        loss_mask=batch.loss_mask,
        loss_cu_seqlens=batch.cu_seqlens,
    )


def config(loss: str) -> PolicyLossConfig:
    return PolicyLossConfig(loss=loss, drpo_epsilon=0.2, eps_clip_higher=0.28, entropy_coef=0.01)


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_one_step_over_micro_batches_is_the_step_over_the_batch(loss):
    batch = random_batch((5, 3, 6), seed=4)
    denominators = count_denominators(batch.loss_mask, batch.cu_seqlens)
    algorithm = make_algorithm(config(loss))
    whole, split = BiasActor(), BiasActor()
    expected = algorithm.compute_loss_and_backward(whole, [micro_batch(batch)], denominators)
    micro_batches = [micro_batch(batch.select([i])) for i in range(3)]
    found = algorithm.compute_loss_and_backward(split, micro_batches, denominators)
    torch.testing.assert_close(split.shift.grad, whole.shift.grad, rtol=0, atol=1e-12)
    assert merge_metrics(found) == pytest.approx(merge_metrics(expected), rel=1e-12)
    inputs = batch.inputs()
    inputs["logp"] = batch.logp
    assert merge_metrics(found)["loss"] == pytest.approx(policy_loss(config(loss), **inputs).loss.item())


def test_names_and_classes():
    assert [type(make_algorithm(config(loss))).__name__.lower() for loss in LOSS_NAMES] == LOSS_NAMES
    assert isinstance(make_algorithm(config("drpo")), DRPO)
    assert isinstance(make_algorithm(config("ppo")), PPO)


def test_an_algorithm_from_keys():
    assert DRPO({"drpo_epsilon": 0.5}).config == PolicyLossConfig(loss="drpo", drpo_epsilon=0.5)
    assert PPO(eps_clip=0.1).config == PolicyLossConfig(loss="ppo", eps_clip=0.1)
    assert isinstance(make_algorithm({"loss": "ppo"}), PPO)
    with pytest.raises(ValueError, match="did you mean 'drpo_epsilon'"):
        DRPO(drpo_epsilom=0.5)
    with pytest.raises(ValueError, match="DRPO: found a config of loss ppo"):
        DRPO(PolicyLossConfig(loss="ppo"))
    with pytest.raises(TypeError, match="expected one of them"):
        DRPO(PolicyLossConfig(), drpo_epsilon=0.5)


def test_drpo_takes_one_update_per_batch():
    assert not DRPO.supports_multi_update
    assert PPO.supports_multi_update


def test_extra_terms_move_samples_without_advantage():
    assert make_algorithm(PolicyLossConfig()).zero_advantage_means_zero_gradient
    assert not make_algorithm(config("drpo")).zero_advantage_means_zero_gradient
    assert not make_algorithm(PolicyLossConfig(kl_coef=0.1)).zero_advantage_means_zero_gradient


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_without_advantage_there_is_no_gradient(loss):
    """What `zero_advantage_means_zero_gradient` promises, so that such samples need not run through the model."""
    batch = random_batch((4, 5), seed=6)
    batch.advantages[:] = 0
    actor = BiasActor()
    plain = PolicyLossConfig(loss=loss, eps_clip_higher=0.28)
    make_algorithm(plain).compute_loss_and_backward(actor, [micro_batch(batch)], Denominators(9, 2))
    assert actor.shift.grad == 0


def test_a_config_that_breaks_a_rule_is_refused():
    with pytest.raises(ValueError, match="algorithm: loss: found 'grpo'"):
        make_algorithm(PolicyLossConfig(loss="grpo"))
    with pytest.raises(ValueError, match="horizon: found null"):
        DRPO(PolicyLossConfig(loss_agg_mode="seq-mean-token-sum-norm"))
