"""The frozen policy, and the KL to it as a term of the loss."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from tests.train.megatron.conftest import assert_gradients_close, make_batches, reference_log_probs
from tests.train.test_stack import uneven_part
from unirl.algorithms import PolicyLossConfig, make_algorithm
from unirl.algorithms.aggregate import Denominators
from unirl.config.schema import ModelConfig, ParallelConfig, StackConfig
from unirl.train.log_prob_pass import log_prob_pass
from unirl.train.megatron.policy import MegatronPolicy
from unirl.train.stack import TrainStack


@pytest.fixture
def make_policy():
    policies = []

    def make(folder, dtype="float32"):
        policy = MegatronPolicy(
            ModelConfig(path=str(folder), dtype=dtype), parallel=ParallelConfig(), temperature=0.8, seed=0
        )
        policies.append(policy)
        return policy

    yield make
    for policy in policies:
        policy.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_policy_says_what_the_actor_says(make_folder, make_actor, make_policy, dtype):
    folder, _ = make_folder()
    batches = make_batches(token_budget=80)
    policy, actor = make_policy(folder, dtype), make_actor(folder, temperature=0.8, dtype=dtype)
    for (found, _), (expected, _) in zip(policy.log_probs(batches), actor.log_probs(batches), strict=True):
        assert torch.equal(found, expected)


def test_a_frozen_policy_holds_its_weights_and_nothing_else(make_folder, make_policy):
    folder, reference = make_folder()
    policy = make_policy(folder)
    assert not any(parameter.requires_grad for parameter in policy.model.parameters())
    assert not any(hasattr(parameter, "main_grad") for parameter in policy.model.parameters())
    policy.log_probs(make_batches())
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    count = sum(parameter.numel() for parameter in policy.model.parameters())
    assert count == sum(parameter.numel() for parameter in reference.parameters())


@pytest.mark.parametrize("kind", ["policy", "actor"])
def test_close_frees_the_weights(make_folder, make_actor, make_policy, kind):
    folder, _ = make_folder()
    kept, closed = make_policy(folder), (make_policy if kind == "policy" else make_actor)(folder)
    weights = [weakref.ref(parameter) for parameter in closed.model.parameters()]
    closed.close()
    gc.collect()
    assert not any(weight() is not None for weight in weights)
    kept.log_probs(make_batches())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradient_of_the_kl_term_is_that_of_transformers(make_folder, make_actor, make_policy, estimator):
    """Without advantages the KL is the whole loss; kl_coef 0.5, the mean over all tokens."""
    (folder, model), (other, reference) = make_folder(seed=0), make_folder(seed=1)
    config = PolicyLossConfig(loss="ppo", kl_coef=0.5, kl_estimator=estimator)
    (batch,) = make_batches()
    (ref_logp, _), actor = make_policy(other).log_probs([batch])[0], make_actor(folder, temperature=0.8)
    batch = replace(batch, ref_logp=ref_logp, advantages=torch.zeros_like(ref_logp))
    tokens = batch.targets.numel()
    make_algorithm(config).compute_loss_and_backward(actor, [batch], Denominators(tokens, 11))

    logp, _ = reference_log_probs(model, batch, 0.8)
    with torch.no_grad():
        x_ref, _ = reference_log_probs(reference, batch, 0.8)
    x = logp - x_ref
    estimate = {"k1": x, "k2": x**2 / 2, "k3": (-x).exp() - 1 + x}[estimator]
    (0.5 * estimate.sum() / tokens).backward()
    assert_gradients_close(dict(actor.gradients()), {name: p.grad for name, p in model.named_parameters()})


def test_the_kl_to_the_start_policy_is_zero_and_then_grows(make_folder, make_actor, make_policy):
    folder, _ = make_folder()
    stack = StackConfig(micro_batch_tokens=30)
    reference, actor = make_policy(folder), make_actor(folder, temperature=0.8, lr=1e-2)
    part = uneven_part()
    part = replace(part, ref_logp=log_prob_pass(reference, part, stack))
    trainer = TrainStack(actor, make_algorithm(PolicyLossConfig(loss="ppo", kl_coef=0.01)), stack)
    kls = [trainer.train_track(part)["ref_kl"] for _ in range(3)]
    assert kls[0] == 0
    assert 0 < kls[1] < kls[2]
