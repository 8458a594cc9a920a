"""The fused loss in the actor against log-probs, policy_loss and autograd: the same metrics and the same gradients."""

from dataclasses import replace

import pytest
import torch

from tests.train.megatron.conftest import (  # noqa: F401 - fixtures
    assert_gradients_close,
    make_actor,
    make_batches,
    make_folder,
    weighted_loss,
)
from unirl.algorithms import Denominators, PolicyLossConfig, PolicyLossFunction, RejectionConfig, merge_metrics
from unirl.errors import UserError
from unirl.train import fused_loss
from unirl.train.packing import MicroBatch

DECOUPLED = {"loss": "ppo", "use_decoupled_loss": True, "entropy_coef": 0.01}
LOSSES = {
    "drpo": PolicyLossConfig(loss="drpo", drpo_epsilon=0.002, loss_agg_mode="seq-mean-token-sum-norm", horizon=20),
    "ppo": PolicyLossConfig(loss="ppo", eps_clip_higher=0.28, c_clip=3.0, loss_agg_mode="seq-mean-token-mean"),
    "spo-recomputed": PolicyLossConfig(loss="spo", old_logp_source="recompute"),
    "dppo": PolicyLossConfig(loss="dppo", dppo_delta=0.002, entropy_coef=0.02),
    "sapo": PolicyLossConfig(loss="sapo"),
    "cispo": PolicyLossConfig(loss="cispo", eps_clip_higher=0.4),
    "rejected-tokens": PolicyLossConfig(**DECOUPLED, rejection_sampling=RejectionConfig(lower=0.8, upper=1.2)),
    "rejected-sequences": PolicyLossConfig(
        **DECOUPLED, rejection_sampling=RejectionConfig(level="sequence", lower=0.95, upper=1.05)
    ),
}
DENOMINATORS = Denominators(tokens=50, sequences=11)


def batches_near(actor) -> list[MicroBatch]:
    """Micro-batches whose rollout and proximal policies are near the actor's, with a few tokens that have no value."""
    generator = torch.Generator().manual_seed(3)
    plain = make_batches(token_budget=80)
    batches = []
    for batch, (logp, _) in zip(plain, actor.log_probs(plain), strict=True):
        noise = 0.3 * torch.randn(2, logp.numel(), generator=generator)
        mask = torch.rand(logp.numel(), generator=generator) > 0.1
        old_logp = torch.where(mask, logp + noise[0], torch.nan)
        batches.append(replace(batch, old_logp=old_logp, prox_logp=logp + noise[1], loss_mask=mask))
    return batches


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", LOSSES)
def test_same_metrics_and_gradients(make_folder, make_actor, name, temperature):  # noqa: F811
    folder, _ = make_folder("qwen3-tied")
    found = {}
    for kernel in ("separate", "fused"):
        actor = make_actor(folder, temperature=temperature, loss_kernel=kernel)
        batches = batches_near(actor)
        metrics = actor.forward_backward(batches, PolicyLossFunction(LOSSES[name], DENOMINATORS))
        found[kernel] = merge_metrics(metrics), dict(actor.gradients())
    assert found["fused"][0] == pytest.approx(found["separate"][0], rel=1e-5, abs=1e-6)
    assert found["fused"][0]["clip_ratio"] > 0 or name == "sapo"
    assert_gradients_close(found["fused"][1], found["separate"][1])


def test_auto_takes_the_fused_kernel_where_it_has_the_loss(make_folder, make_actor, monkeypatch):  # noqa: F811
    folder, _ = make_folder("qwen3-tied")
    calls = []
    fused = fused_loss.fused_policy_loss

    def counted(*args, **options):
        calls.append(1)
        return fused(*args, **options)

    monkeypatch.setattr(fused_loss, "fused_policy_loss", counted)
    actor = make_actor(folder)
    batches = batches_near(actor)
    gspo = PolicyLossConfig(loss="ppo", importance_sampling_level="sequence")
    for loss_fn, expected in (
        (PolicyLossFunction(LOSSES["drpo"], DENOMINATORS), len(batches)),
        (PolicyLossFunction(gspo, DENOMINATORS), 0),
        (weighted_loss, 0),
    ):
        calls.clear()
        actor.forward_backward(batches, loss_fn)
        assert len(calls) == expected


def test_fused_is_refused_for_a_loss_of_sequences(make_folder, make_actor):  # noqa: F811
    folder, _ = make_folder("qwen3-tied")
    actor = make_actor(folder, loss_kernel="fused")
    gspo = PolicyLossConfig(loss="ppo", importance_sampling_level="sequence")
    with pytest.raises(
        UserError, match=r"stack\.loss_kernel=fused: importance_sampling_level=sequence.*auto or separate"
    ):
        actor.forward_backward(make_batches(), PolicyLossFunction(gspo, DENOMINATORS))
