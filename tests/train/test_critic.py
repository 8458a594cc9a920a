"""`TrainStack` with a critic: real Megatron models, policy and critic on the same micro-batches."""

from dataclasses import replace

import pytest
import torch

from tests.train.megatron.conftest import make_actor, make_folder  # noqa: F401 - fixtures
from tests.train.megatron.test_critic import make_critic  # noqa: F401 - a fixture
from tests.train.test_stack import uneven_part
from unirl.algorithms import PolicyLossConfig, ValueLossConfig, make_algorithm
from unirl.config.schema import StackConfig
from unirl.train.critic import CriticTrainer
from unirl.train.megatron.weights import iterate_weights
from unirl.train.stack import TrainStack


@pytest.fixture
def make_stack(make_folder, make_actor, make_critic):  # noqa: F811
    folder, _ = make_folder()

    def make(**stack) -> TrainStack:
        config = StackConfig(**stack)
        critic = CriticTrainer(make_critic(folder, lr=1e-2), ValueLossConfig(), config)
        algorithm = make_algorithm(PolicyLossConfig(loss="ppo", loss_agg_mode="token-mean"))
        return TrainStack(make_actor(folder, lr=1e-2), algorithm, config, critic=critic)

    return make


def weights(model) -> list[torch.Tensor]:
    return [tensor for _, tensor in iterate_weights(model.chunks)]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def estimated(stack: TrainStack, part):
    """Values of the critic; a return of 1 for every generated token."""
    part = stack.with_values(part)
    return replace(part, returns=part.text.loss_mask.float())


def test_values_belong_to_generated_tokens_whatever_the_packing(make_stack):
    part = uneven_part()
    values = make_stack().with_values(part).values
    assert values[part.text.loss_mask].all()
    assert not values[~part.text.loss_mask].any()
    for stack in ({"micro_batch_tokens": 30}, {"share_prompts": True}):
        torch.testing.assert_close(make_stack(**stack).with_values(part).values, values, atol=1e-5, rtol=0)


def test_warm_up_trains_the_critic_and_leaves_the_policy_bit_identical(make_stack):
    stack = make_stack(num_updates_per_batch=2)
    part = estimated(stack, uneven_part())
    policy, critic = weights(stack.actor), weights(stack.critic.critic)
    metrics = stack.train_track(part, train_policy=False)
    assert same(weights(stack.actor), policy)
    assert not same(weights(stack.critic.critic), critic)
    assert (metrics["optimizer_steps"], metrics["critic/optimizer_steps"]) == (0, 2)
    assert "loss" not in metrics
    assert stack.actor.optimizer.steps == 0

    metrics = stack.train_track(part)
    assert not same(weights(stack.actor), policy)
    assert (metrics["optimizer_steps"], metrics["critic/optimizer_steps"]) == (2, 2)


def test_the_critic_learns_from_samples_that_teach_the_policy_nothing(make_stack):
    stack = make_stack()
    part = estimated(stack, uneven_part([0.5] * 10))
    assert not part.advantages.any()
    policy = weights(stack.actor)
    first = stack.train_track(part)
    assert (first["optimizer_steps"], first["critic/optimizer_steps"]) == (0, 1)
    assert same(weights(stack.actor), policy)
    assert first["returns/mean"] == 1
    for _ in range(5):
        last = stack.train_track(part)
    assert last["value_loss"] < first["value_loss"] / 2


def test_any_split_gives_one_value_loss(make_stack):
    found = []
    for options in ({}, {"micro_batch_tokens": 30}, {"share_prompts": True}):
        stack = make_stack(**options)
        found.append(stack.train_track(estimated(stack, uneven_part()), train_policy=False))
    for name in ("value_loss", "critic/grad_norm", "values/mean"):
        assert [metrics[name] for metrics in found] == pytest.approx([found[0][name]] * 3, rel=1e-4)


def test_an_empty_batch_makes_no_step(make_stack):
    stack = make_stack()
    metrics = stack.train_track(estimated(stack, uneven_part().select(torch.arange(0))))
    assert metrics["optimizer_steps"] == 0
    assert metrics["values/mean"] is None
    assert "value_loss" not in metrics


def test_a_part_without_returns_is_refused(make_stack):
    with pytest.raises(ValueError, match="the critic needs values and returns"):
        make_stack().train_track(uneven_part())
