"""`TrainStack` over a real Megatron actor."""

from dataclasses import replace

import pytest
import torch

from tests.train.conftest import make_part
from tests.train.megatron.conftest import VOCAB, assert_gradients_close, make_actor, make_folder  # noqa: F401 - fixtures
from unirl.algorithms import PolicyLossConfig, make_algorithm
from unirl.config.schema import StackConfig
from unirl.train.stack import TrainStack

LOSSES = {
    "drpo": PolicyLossConfig(loss="drpo", drpo_epsilon=0.2, loss_agg_mode="seq-mean-token-sum-norm", horizon=20),
    "ppo": PolicyLossConfig(loss="ppo", eps_clip=0.2, loss_agg_mode="token-mean"),
    "entropy": PolicyLossConfig(loss="ppo", eps_clip=0.2, loss_agg_mode="seq-mean-token-mean", entropy_coef=0.01),
}


def uneven_part(rewards=None):
    generator = torch.Generator().manual_seed(1)

    def ids(count):
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    shapes = [(5, (3, 7, 1)), (1, (12, 2)), (9, (4, 4, 4)), (3, (6, 1))]
    return make_part([(ids(p), [ids(n) for n in counts]) for p, counts in shapes], rewards=rewards)


@pytest.fixture
def train(make_folder, make_actor):  # noqa: F811
    """Trains a fresh actor on a part; gives the gradients before the step, the metrics, the weights after it."""
    folder, _ = make_folder("qwen3-tied")

    def run(part, loss="drpo", *, allow_multi_update=False, **stack):
        actor = make_actor(folder, lr=1e-2)
        gradients = []
        step = actor.optimizer_step
        actor.optimizer_step = lambda: (gradients.append({n: g.clone() for n, g in actor.gradients()}), step())[1]
        trainer = TrainStack(
            actor, make_algorithm(LOSSES[loss]), StackConfig(**stack), allow_multi_update=allow_multi_update
        )
        return gradients, trainer.train_track(part), dict(actor.export_weights())

    return run


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("stack", [{"micro_batch_tokens": 13}, {"micro_batch_tokens": 30}, {"share_prompts": True}])
def test_any_split_gives_one_gradient_and_one_loss(train, loss, stack):
    part = uneven_part()
    (whole,), metrics, _ = train(part, loss)
    (split,), split_metrics, _ = train(part, loss, **stack)
    assert_gradients_close(split, whole)
    for name in ("loss", "grad_norm", "ratio_mean", "ratio_max", "approx_kl", "entropy"):
        assert split_metrics[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6)


def test_samples_that_teach_nothing_stay_in_the_denominator(train):
    """The second group's rewards are equal: it is skipped, and the loss is still a mean over all ten samples."""
    rewards = [1.0, 0.0, 0.4, 0.3, 0.3, 0.0, 1.0, 0.0, 1.0, 0.0]
    (skipping,), metrics, _ = train(uneven_part(rewards))
    assert metrics["trained_fraction"] == pytest.approx(0.8)
    # a vanishing advantage makes the same samples run through the model
    part = uneven_part(rewards)
    nudged = torch.where(part.text.loss_mask & (part.advantages == 0), 1e-30, part.advantages)
    (everything,), all_metrics, _ = train(replace(part, advantages=nudged))
    assert all_metrics["trained_fraction"] == 1.0
    assert_gradients_close(skipping, everything)
    assert metrics["loss"] == pytest.approx(all_metrics["loss"], rel=1e-5)


def test_sample_without_a_verdict_is_as_if_absent(train):
    rewards = [1.0, 0.0, 0.5, 1.0, float("nan"), 0.0, 1.0, 0.0, 1.0, 0.0]
    part = uneven_part(rewards)
    (dropped,), _, _ = train(part)
    present = torch.tensor([i for i in range(len(part)) if i != 4])
    (absent,), _, _ = train(part.select(present).compute_advantages())
    assert_gradients_close(dropped, absent)


def test_token_with_a_log_prob_that_is_not_finite_is_dropped(train):
    part = uneven_part()
    part.text.log_probs[6] = float("nan")
    (gradients,), metrics, _ = train(part, "ppo")
    assert all(torch.isfinite(g).all() for g in gradients.values())
    assert metrics["skipped_steps"] == 0


@pytest.mark.parametrize("loss", ["drpo", "ppo"])
def test_equal_rewards_make_no_step(train, loss):
    part = uneven_part([0.5] * 10)
    gradients, metrics, weights = train(part, loss)
    assert gradients == []
    assert metrics == {"optimizer_steps": 0, "skipped_steps": 0, "trained_fraction": 0.0}
    _, _, untouched = train(part.select(torch.arange(0)), loss)
    assert all(torch.equal(weights[name], untouched[name]) for name in weights)


def test_drpo_refuses_a_second_update_on_the_same_rollouts(train):
    with pytest.raises(ValueError, match=r"DRPO makes one update.*num_updates_per_batch=2.*allow_multi_update=true"):
        train(uneven_part(), num_updates_per_batch=2)


@pytest.mark.parametrize("loss", ["ppo", "spo", "dppo", "sapo", "cispo"])
def test_other_losses_take_several_updates(loss):
    TrainStack(None, make_algorithm({"loss": loss, "eps_clip_higher": 0.3}), StackConfig(num_updates_per_batch=2))


@pytest.mark.parametrize(("loss", "allow"), [("ppo", False), ("drpo", True)])
def test_mini_batches_are_disjoint_whole_groups(train, loss, allow):
    part = uneven_part()
    (first, _), metrics, _ = train(part, loss, num_updates_per_batch=2, allow_multi_update=allow)
    assert metrics["optimizer_steps"] == 2
    half = part.select(torch.tensor([0, 1, 2, 5, 6, 7]))
    (alone,), _, _ = train(half, loss)
    assert_gradients_close(first, alone)
