"""The critic against transformers' trunk with a linear head."""

import pytest
import torch
from transformers import AutoModel

from tests.train.megatron.conftest import (
    FAMILIES,
    assert_gradients_close,
    make_batches,
    reference_gradients,
    sample_tokens,
)
from unirl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from unirl.train.megatron.critic import MegatronCritic
from unirl.train.megatron.weights import iterate_weights


@pytest.fixture
def make_critic():
    critics = []

    def make(folder, *, dtype="float32", seed=0, max_grad_norm=1.0, **optimizer) -> MegatronCritic:
        critics.append(
            MegatronCritic(
                ModelConfig(path=str(folder), dtype=dtype),
                parallel=ParallelConfig(),
                optimizer=OptimizerConfig(**optimizer),
                max_grad_norm=max_grad_norm,
                total_steps=10,
                seed=seed,
            )
        )
        return critics[-1]

    yield make
    for critic in critics:
        critic.close()


def head_of(critic: MegatronCritic) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight [1, H], bias [1]) of the head, made large enough to matter."""
    head = critic.model.value_head
    with torch.no_grad():
        head.weight.mul_(20)
        head.bias.fill_(0.3)
    return head.weight.detach().clone().requires_grad_(), head.bias.detach().clone().requires_grad_()


def reference_values(trunk, weight, bias, batch) -> torch.Tensor:
    """Values [R] by transformers, one sample at a time: from the state before each response token."""
    rows = [trunk(tokens[None]).last_hidden_state[0, -count - 1 : -1].float() for tokens, count in sample_tokens(batch)]
    return torch.nn.functional.linear(torch.cat(rows), weight, bias)[:, 0]


def squared_loss(batch, values):
    return ((values - torch.sin(batch.targets.float())) ** 2).sum() / 50, {"tokens": values.numel()}


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_equal_those_of_transformers(make_folder, make_critic, family):
    folder, _ = make_folder(family)
    critic = make_critic(folder)
    weight, bias = head_of(critic)
    trunk = AutoModel.from_pretrained(folder, attn_implementation="eager")
    (batch,) = make_batches()
    (found,) = critic.values([batch])
    expected = reference_values(trunk, weight, bias, batch)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

    assert critic.forward_backward([batch], squared_loss) == [{"tokens": batch.targets.numel()}]
    squared_loss(batch, expected)[0].backward()
    gradients = {name.removeprefix("model."): gradient for name, gradient in critic.gradients()}
    head = critic.model.value_head
    gradients |= {"weight": head.weight.main_grad, "bias": head.bias.main_grad}
    assert_gradients_close(gradients, reference_gradients(trunk) | {"weight": weight.grad, "bias": bias.grad})


def test_any_packing_and_shared_prompts_give_the_same_values(make_folder, make_critic):
    folder, _ = make_folder()
    critic = make_critic(folder)
    head_of(critic)

    def by_sample(batches):
        found = {}
        for batch, values in zip(batches, critic.values(batches), strict=True):
            rows = values.split(batch.loss_cu_seqlens.diff().tolist())
            found |= dict(zip(batch.sample_positions.tolist(), rows, strict=True))
        return found

    expected = by_sample(make_batches())
    for options in ({"token_budget": 40}, {"share_prompts": True}):
        found = by_sample(make_batches(**options))
        assert found.keys() == expected.keys()
        for sample, values in expected.items():
            torch.testing.assert_close(found[sample], values, atol=1e-5, rtol=0)


def test_first_values_are_small_and_drawn_from_the_seed(make_folder, make_critic):
    folder, _ = make_folder()
    batches = make_batches()
    (first,), (same,), (other,) = (make_critic(folder, seed=seed).values(batches) for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert 0 < first.abs().max() < 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_learns_and_two_and_two_steps_are_four_steps(tmp_path, make_folder, make_critic, dtype):
    folder, _ = make_folder()
    batches = make_batches(token_budget=40)

    def train(critic, count):
        losses = []
        for _ in range(count):
            critic.forward_backward(batches, squared_loss)
            critic.optimizer_step()
            values = critic.values(batches)
            losses.append(sum(squared_loss(b, v)[0].item() for b, v in zip(batches, values, strict=True)))
        return losses

    critic = make_critic(folder, dtype=dtype, lr=1e-2)
    head = critic.model.value_head
    assert head.weight.dtype == torch.float32
    before = train(critic, 2)
    critic.save(tmp_path)
    resumed = make_critic(folder, dtype=dtype, lr=1e-2, seed=5)
    resumed.load(tmp_path)
    after = train(critic, 2)
    assert after == train(resumed, 2)
    assert after[-1] < before[0]
    assert torch.equal(head.weight, resumed.model.value_head.weight)
    pairs = zip(iterate_weights(critic.chunks), iterate_weights(resumed.chunks), strict=True)
    assert all(torch.equal(weight, other) for (_, weight), (_, other) in pairs)
