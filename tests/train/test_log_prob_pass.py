"""Passes over drawn samples with a real actor: their place in the part, and the proximal policy of an update."""

from dataclasses import replace

import pytest
import torch

from tests.train.conftest import with_support
from tests.train.megatron.conftest import assert_gradients_close, make_actor, make_folder  # noqa: F401 - fixtures
from tests.train.test_stack import uneven_part
from unirl.algorithms import PolicyLossConfig, make_algorithm
from unirl.config.schema import StackConfig
from unirl.train.log_prob_pass import log_prob_pass
from unirl.train.stack import TrainStack

STACKS = [{}, {"micro_batch_tokens": 13}, {"micro_batch_tokens": 30}, {"share_prompts": True}]
PROXIMAL = {
    "recompute": PolicyLossConfig(loss="ppo", eps_clip=0.2, old_logp_source="recompute"),
    "decoupled": PolicyLossConfig(loss="ppo", eps_clip=0.2, use_decoupled_loss=True),
}
ROLLOUT = PolicyLossConfig(loss="ppo", eps_clip=0.2)


@pytest.fixture
def actor(make_folder, make_actor):  # noqa: F811
    """A policy, and what transformers says of it."""
    folder, reference = make_folder("qwen3-tied")
    actor = make_actor(folder, temperature=0.8, lr=1e-2)
    actor.reference = reference
    return actor


def on_policy(part, actor):
    """The part as if `actor` had drawn it."""
    return replace(part, text=replace(part.text, log_probs=log_prob_pass(actor, part, StackConfig())))


def train(actor, part, config, **stack):
    return TrainStack(actor, make_algorithm(config), StackConfig(**stack)).train_track(part)


@pytest.mark.parametrize("stack", STACKS)
def test_every_token_gets_its_log_prob(actor, stack):
    part = uneven_part()
    found = log_prob_pass(actor, part, StackConfig(**stack))
    expected = []
    for sample in part.text.tokens.split(part.text.lengths.tolist()):
        with torch.no_grad():
            rows = (actor.reference(sample[None]).logits[0] / 0.8).log_softmax(-1)
        expected.append(torch.cat([torch.zeros(1), rows[:-1].gather(1, sample[1:, None])[:, 0]]))
    torch.testing.assert_close(found, torch.cat(expected) * part.text.loss_mask, atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("stack", STACKS[-2:])
def test_log_probs_among_the_tokens_sampled_from(make_folder, make_actor, stack, chunk):  # noqa: F811
    folder, reference = make_folder("qwen3-tied")
    actor = make_actor(folder, temperature=0.8, logits_chunk_tokens=chunk)
    part = with_support(uneven_part(), actor.vocab_size)
    found, position = log_prob_pass(actor, part, StackConfig(**stack)), 0
    for sample in part.text.tokens.split(part.text.lengths.tolist()):
        with torch.no_grad():
            rows = reference(sample[None]).logits[0] / 0.8
        for place, token in enumerate(sample.tolist()):
            support = part.text.support[position + place]
            support = support[support >= 0].long()
            expected = (rows[place - 1, token] - rows[place - 1, support].logsumexp(0)).item() if len(support) else 0.0
            assert found[position + place].item() == pytest.approx(expected, abs=1e-5)
        position += len(sample)


@pytest.mark.parametrize("loss", ["ppo", "drpo", "spo", "dppo", "sapo", "cispo"])
def test_every_loss_finds_a_ratio_of_one_among_the_tokens_sampled_from(actor, loss):
    """Losses that have a fused kernel, too, which is of the whole vocabulary."""
    part = on_policy(with_support(uneven_part(), actor.vocab_size), actor)
    metrics = train(actor, part, PolicyLossConfig(loss=loss, eps_clip_higher=0.3), micro_batch_tokens=13)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["approx_kl_abs"] < 1e-5


def test_an_empty_part_has_no_log_probs(actor):
    assert log_prob_pass(actor, uneven_part().select(torch.arange(0)), StackConfig()).shape == (0,)


@pytest.mark.parametrize("config", PROXIMAL.values(), ids=PROXIMAL)
@pytest.mark.parametrize("stack", STACKS)
def test_the_first_update_is_exactly_on_policy_whatever_the_packing(actor, config, stack):
    """Though the rollout's log-probs are far off, and one group teaches nothing and is not run."""
    part = uneven_part([1.0, 0.0, 0.4, 0.3, 0.3, 0.0, 1.0, 0.0, 1.0, 0.0])
    metrics = train(actor, part, config, **stack)
    assert metrics["trained_fraction"] == pytest.approx(0.8)
    assert metrics["approx_kl"] == metrics["approx_kl_abs"] == 0
    assert metrics["ratio_mean"] == metrics["ratio_max"] == 1
    assert metrics["rollout_replay_logp_absdiff_mean"] > 0.5


def test_the_first_update_is_exactly_on_policy_with_logits_in_chunks(make_folder, make_actor):  # noqa: F811
    folder, _ = make_folder("qwen3-tied")
    metrics = train(make_actor(folder, logits_chunk_tokens=3), uneven_part(), next(iter(PROXIMAL.values())))
    assert metrics["approx_kl_abs"] == 0
    assert metrics["ratio_max"] == 1


@pytest.mark.parametrize("config", PROXIMAL.values(), ids=PROXIMAL)
def test_on_policy_the_proximal_policy_is_the_rollout_policy(actor, config):
    metrics = train(actor, on_policy(uneven_part(), actor), config, micro_batch_tokens=13)
    assert metrics["rollout_replay_logp_absdiff_mean"] < 1e-5
    if config.use_decoupled_loss:
        assert metrics["behave_approx_kl_abs"] < 1e-5
        assert metrics["behave_weight_mean"] == pytest.approx(1, abs=1e-5)
        assert metrics["behave_cap_ratio"] == 0


@pytest.mark.parametrize("config", PROXIMAL.values(), ids=PROXIMAL)
def test_later_updates_keep_the_proximal_policy_of_before_the_first(actor, config):
    metrics = train(actor, on_policy(uneven_part(), actor), config, num_updates_per_batch=2)
    assert metrics["optimizer_steps"] == 2
    assert metrics["approx_kl"] > 1e-4, "the second update is off policy by the first"
    assert metrics["rollout_replay_logp_absdiff_mean"] < 1e-5, "rollout against the policy that was published"


def test_a_recomputed_anchor_is_a_rollout_by_the_trainer(make_folder, make_actor):  # noqa: F811
    """Both updates of a batch: textbook PPO, whose old log-probs are those of the policy that is trained."""
    folder, _ = make_folder("qwen3-tied")
    weights = []
    for source in ("recompute", "rollout"):
        trained = make_actor(folder, lr=1e-2)
        part = uneven_part() if source == "recompute" else on_policy(uneven_part(), trained)
        train(trained, part, replace(ROLLOUT, old_logp_source=source), num_updates_per_batch=2)
        weights.append(dict(trained.export_weights()))
    assert_gradients_close(*weights, tolerance=1e-3)  # AdamW's first step magnifies what is rounding in a gradient


def test_a_token_whose_rollout_log_prob_is_lost_is_dropped(actor):
    part = uneven_part()
    part.text.log_probs[6] = float("nan")
    metrics = train(actor, part, PROXIMAL["decoupled"])
    assert metrics["skipped_steps"] == 0
    assert metrics["approx_kl"] == 0
