"""The policy loss: closed-form derivatives, invariances, what is dropped, metrics, messages."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.batches import CONFIGS, LOSSES, MODES, Batch, batches, random_batch, tensor_names
from unirl.algorithms import (
    Denominators,
    PolicyLossConfig,
    count_denominators,
    merge_metrics,
    policy_loss,
    policy_loss_derivative,
)
from unirl.algorithms.loss import surrogate_terms

PROPERTY = settings(max_examples=10, deadline=None, derandomize=True)

modes = st.sampled_from(MODES)


def loss_and_gradients(
    config: dict, batch: Batch, denominators: Denominators | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, d loss / d logp and d loss / d entropy."""
    inputs = batch.inputs()
    loss = policy_loss(config, **inputs, denominators=denominators).loss
    gradients = torch.autograd.grad(
        loss, [inputs["logp"], inputs["entropy"]], allow_unused=True, materialize_grads=True
    )
    return loss.detach(), *gradients


def assert_same(found, expected, atol=1e-12):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def derivative(config: dict, batch: Batch) -> torch.Tensor:
    inputs = batch.inputs()
    del inputs["entropy"]
    return policy_loss_derivative(config, **inputs)


@pytest.mark.parametrize("name", CONFIGS)
def test_closed_form_derivative_is_what_autograd_says(name):
    for seed in range(4):
        batch = random_batch((5, 0, 7, 1, 4), seed)
        # A log ratio beyond the clamp, where no gradient passes through the ratio.
        batch.logp[2] = batch.old_logp[2] - 25
        batch.prox_logp[9] = batch.old_logp[9] + 3
        _, gradient, _ = loss_and_gradients(CONFIGS[name], batch)
        torch.testing.assert_close(derivative(CONFIGS[name], batch), gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_splitting_over_micro_batches_changes_nothing(name):
    @settings(PROPERTY, max_examples=5)
    @given(batch=batches, data=st.data())
    def check(batch, data):
        count = len(batch.lengths)
        home = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
        order = data.draw(st.permutations(range(count)))
        denominators = count_denominators(batch.loss_mask, batch.cu_seqlens)
        whole = loss_and_gradients(CONFIGS[name], batch)
        total = [torch.zeros_like(part) for part in whole]
        for micro in set(home):
            sequences = [i for i in order if home[i] == micro]
            loss, *gradients = loss_and_gradients(CONFIGS[name], batch.select(sequences), denominators)
            total[0] += loss
            for sum_of_parts, gradient in zip(total[1:], gradients, strict=True):
                sum_of_parts[batch.token_order(sequences)] += gradient
        assert_same(total, whole)

    check()


@pytest.mark.parametrize("name", LOSSES)
def test_the_order_of_sequences_does_not_matter(name):
    @PROPERTY
    @given(batch=batches, mode=modes, data=st.data())
    def check(batch, mode, data):
        config = CONFIGS[f"{name}/{mode}"]
        order = data.draw(st.permutations(range(len(batch.lengths))))
        tokens = batch.token_order(order)
        loss, *gradients = loss_and_gradients(config, batch)
        moved = loss_and_gradients(config, batch.select(order))
        assert_same(moved, [loss, *(gradient[tokens] for gradient in gradients)])

    check()


@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_never_matter(name):
    @PROPERTY
    @given(
        batch=batches, mode=modes, junk=st.sampled_from([0.0, -37.5, 1e30, float("nan"), float("inf"), -float("inf")])
    )
    def check(batch, mode, junk):
        config = CONFIGS[f"{name}/{mode}"]
        expected = loss_and_gradients(config, batch)
        spoilt = Batch(
            **{
                field: getattr(batch, field).masked_fill(~batch.loss_mask, junk)
                for field in tensor_names()
                if field != "loss_mask"
            },
            loss_mask=batch.loss_mask,
            lengths=batch.lengths,
        )
        found = loss_and_gradients(config, spoilt)
        assert_same(found, expected, atol=0)
        assert not found[1][~batch.loss_mask].any()
        assert not derivative(config, spoilt)[~batch.loss_mask].any()

    check()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("field", ["logp", "old_logp", "advantages"])
@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_an_unmasked_value_that_is_not_finite_drops_its_token_alone(name, field, value):
    batch = random_batch((4, 3), seed=5, masked=0.0)
    batch.loss_mask[:] = True
    getattr(batch, field)[1] = value
    config = {**LOSSES[name], "loss_agg_mode": "token-mean"}
    inputs = batch.inputs()
    output = policy_loss(config, **inputs)
    output.loss.backward()
    assert output.loss.isfinite()
    assert inputs["logp"].grad.isfinite().all()
    assert inputs["logp"].grad[1] == 0
    metrics = merge_metrics([output.metrics])
    assert metrics["nonfinite_tokens"] == 1
    assert all(torch.tensor(value).isfinite() for value in metrics.values())
    # Out of the numerator, not out of the denominator, which is counted before any forward pass.
    without = Batch(**{f: getattr(batch, f).clone() for f in tensor_names()}, lengths=batch.lengths)
    without.loss_mask[1] = False
    expected = policy_loss(config, **without.inputs(), denominators=Denominators(tokens=7, sequences=2))
    torch.testing.assert_close(output.loss, expected.loss, rtol=0, atol=1e-14)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_an_empty_batch_has_loss_zero_with_a_graph(mode, lengths):
    for name in LOSSES:
        loss, gradient, _ = loss_and_gradients(CONFIGS[f"{name}/{mode}"], random_batch(lengths, seed=0))
        assert loss == 0
        assert gradient.shape == (0,)


@pytest.mark.parametrize("mode", MODES)
def test_a_fully_masked_batch_has_loss_and_gradient_zero(mode):
    batch = random_batch((3, 2), seed=1)
    batch.loss_mask[:] = False
    for name in LOSSES:
        config = CONFIGS[f"{name}/{mode}"]
        loss, gradient, _ = loss_and_gradients(config, batch)
        assert loss == 0
        assert not gradient.any()
        assert "ratio_mean" not in merge_metrics([policy_loss(config, **batch.inputs()).metrics])


@pytest.mark.parametrize("name", LOSSES)
def test_float32_and_bfloat16_inputs_are_computed_in_float32(name):
    config = {**LOSSES[name], "loss_agg_mode": "token-mean"}
    batch = random_batch((6, 5), seed=3)
    exact = policy_loss(config, **batch.inputs()).loss
    inputs = {k: v.detach().float() if v.is_floating_point() else v for k, v in batch.inputs().items()}
    single = policy_loss(config, **inputs).loss
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=1e-5, atol=1e-6)
    inputs["logp"] = inputs["logp"].bfloat16()
    assert policy_loss(config, **inputs).loss.dtype == torch.float32


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_log_ratios_stay_finite_in_float32(name):
    batch = random_batch((6,), seed=2, masked=0.0)
    batch.loss_mask[:] = True
    batch.old_logp[:] = torch.tensor([-1000.0, -0.0, -80.0, -1e-9, -30.0, -1.0])
    batch.logp[:] = torch.tensor([-0.0, -1000.0, -0.5, -1e-9, -0.1, -1.0])
    batch.prox_logp[:] = batch.logp
    inputs = {k: v.detach().float() if v.is_floating_point() else v for k, v in batch.inputs().items()}
    inputs["logp"].requires_grad_()
    output = policy_loss({**LOSSES[name], "loss_agg_mode": "token-mean"}, **inputs)
    output.loss.backward()
    assert output.loss.isfinite()
    assert inputs["logp"].grad.isfinite().all()


def on_policy(advantages: list[float], mask: list[bool], lengths: list[int]) -> dict[str, torch.Tensor]:
    """Inputs with ratio 1 at every token."""
    logp = torch.full((len(mask),), -0.5, dtype=torch.float64)
    return {
        "logp": logp,
        "old_logp": logp,
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "loss_mask": torch.tensor(mask),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
    }


def test_token_mean_divides_by_the_active_tokens():
    """Token losses that sum to 16 over 4 active of 6 tokens: 4.0, not 2.67."""
    inputs = on_policy([-1, -3, -100, -5, -7, -100], [True, True, False, True, True, False], [3, 3])
    assert policy_loss({"loss": "ppo", "loss_agg_mode": "token-mean"}, **inputs).loss == 4.0


def test_a_fully_masked_sample_does_not_count():
    inputs = on_policy([-2.0] * 8, [True, False, False, False] + [False] * 4, [4, 4])
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        assert policy_loss({"loss": "ppo", "loss_agg_mode": mode}, **inputs).loss == 2.0
    assert count_denominators(inputs["loss_mask"], inputs["cu_seqlens"]) == Denominators(tokens=1, sequences=1)


@pytest.mark.parametrize("name", ["drpo", "extra_terms", "ppo"])
@pytest.mark.parametrize("counts", [(1, 7), (3, 13)])
def test_denominators_are_those_of_the_whole_batch(name, counts):
    """Token counts [1, 7] over micro-batches, [3, 13] over ranks: the gradient of one big batch, in every term."""
    batch = random_batch(counts, seed=11, masked=0.0)
    batch.loss_mask[:] = True
    config = {**LOSSES[name], "loss_agg_mode": "token-mean"}
    whole = loss_and_gradients(config, batch)
    parts = [batch.select([0]), batch.select([1])]
    denominators = sum(
        (count_denominators(part.loss_mask, part.cu_seqlens) for part in parts), start=Denominators(0, 0)
    )
    assert denominators == Denominators(sum(counts), 2)
    split = [loss_and_gradients(config, part, denominators) for part in parts]
    assert_same([split[0][0] + split[1][0], *map(torch.cat, zip(split[0][1:], split[1][1:], strict=True))], whole)


def test_the_norm_mode_divides_by_the_horizon_alone():
    """Masked tokens at the end of each sequence, as padding would be, change nothing."""
    config = {"loss": "ppo", "loss_agg_mode": "seq-mean-token-sum-norm", "horizon": 8192}
    losses = []
    for width in (10, 20):
        mask = [t < 4 for t in range(width)] * 2
        losses.append(policy_loss(config, **on_policy([1.0] * 2 * width, mask, [width, width])).loss)
    assert losses[0] == losses[1] == -4 / 8192


def test_gspo_takes_the_mean_advantage_of_unmasked_tokens():
    inputs = on_policy([1, 1, 10, 10], [True, True, False, False], [4])
    config = {"loss": "ppo", "importance_sampling_level": "sequence", "loss_agg_mode": "token-mean"}
    assert policy_loss(config, **inputs).loss == -1


def test_per_token_losses_sum_to_the_loss():
    batch = random_batch((5, 4), seed=8)
    for name in LOSSES:
        output = policy_loss({**LOSSES[name], "loss_agg_mode": "token-mean"}, **batch.inputs())
        torch.testing.assert_close(output.per_token.sum() / batch.loss_mask.sum(), output.loss)
        assert not output.per_token[~batch.loss_mask].any()


def test_metrics_of_micro_batches_merge_to_those_of_the_batch():
    batch = random_batch((5, 4, 0, 6), seed=9)
    for name in LOSSES:
        config = {**LOSSES[name], "loss_agg_mode": "token-mean"}
        denominators = count_denominators(batch.loss_mask, batch.cu_seqlens)
        whole = merge_metrics([policy_loss(config, **batch.inputs()).metrics])
        parts = [policy_loss(config, **batch.select([i]).inputs(), denominators=denominators).metrics for i in range(4)]
        assert merge_metrics(parts) == pytest.approx(whole, rel=1e-12)


def test_metrics_are_what_their_names_say():
    old = torch.tensor([0.5, 0.5, 0.25, 0.5], dtype=torch.float64).log()
    new = torch.tensor([0.75, 0.4, 0.25, 0.1], dtype=torch.float64).log()
    output = policy_loss(
        {"loss": "ppo", "eps_clip": 0.2, "loss_agg_mode": "token-mean", "c_clip": 1.1},
        logp=new,
        old_logp=old,
        advantages=torch.tensor([1.0, -1.0, 1.0, 5.0], dtype=torch.float64),
        loss_mask=torch.tensor([True, True, True, False]),
        cu_seqlens=torch.tensor([0, 4]),
        entropy=torch.tensor([1.0, 2.0, 3.0, 9.0], dtype=torch.float64),
    )
    metrics = merge_metrics([output.metrics])
    ratios = torch.tensor([1.5, 0.8, 1.0], dtype=torch.float64)
    assert metrics["ratio_mean"] == pytest.approx(ratios.mean().item())
    assert metrics["ratio_max"] == pytest.approx(1.5)
    assert metrics["approx_kl"] == pytest.approx((ratios - 1 - ratios.log()).mean().item())
    assert metrics["approx_kl_abs"] == pytest.approx(ratios.log().abs().mean().item())
    assert metrics["rollout_replay_logp_absdiff_mean"] == pytest.approx(ratios.log().abs().mean().item())
    assert metrics["clipfrac_upper"] == pytest.approx(1 / 3)
    assert metrics["entropy"] == 2
    assert metrics["nonfinite_tokens"] == 0
    assert metrics["loss"] == output.loss.item()


@pytest.mark.parametrize("loss", ["ppo", "drpo", "spo", "dppo", "sapo", "cispo"])
def test_a_recomputed_source_puts_the_proximal_in_the_place_of_the_rollout_policy(loss):
    """Also in DRPO's factor mu; the metric of the mismatch alone still knows the rollout."""
    batch = random_batch((4, 6), seed=3)
    config = {"loss": loss, "eps_clip_higher": 0.5}
    inputs = batch.inputs()
    found = policy_loss({**config, "old_logp_source": "recompute"}, **inputs)
    expected = policy_loss(config, **{**inputs, "old_logp": batch.prox_logp, "prox_logp": None})
    assert found.loss.item() == expected.loss.item()
    name = "rollout_replay_logp_absdiff_mean"
    metrics, others = (merge_metrics([output.metrics]) for output in (found, expected))
    difference = (batch.prox_logp - batch.old_logp).abs()[batch.loss_mask].mean().item()
    assert metrics.pop(name) == pytest.approx(difference)
    assert others.pop(name) == pytest.approx((batch.logp - batch.prox_logp).abs()[batch.loss_mask].mean().item())
    assert metrics == others


def test_a_proximal_policy_that_is_not_needed_is_not_read():
    inputs = on_policy([1.0, -2.0], [True, True], [2])
    spoilt = {**inputs, "prox_logp": torch.tensor([float("nan"), 0.0])}
    assert policy_loss({"loss": "ppo"}, **spoilt).loss == policy_loss({"loss": "ppo"}, **inputs).loss


def test_actor_loss_is_the_loss_without_kl_and_entropy():
    batch = random_batch((4, 6), seed=3)
    extra = {"loss": "ppo", "kl_coef": 0.1, "entropy_coef": 0.01}
    plain, with_terms = (merge_metrics([policy_loss(c, **batch.inputs()).metrics]) for c in ({"loss": "ppo"}, extra))
    assert with_terms["actor_loss"] == plain["actor_loss"] == plain["loss"]
    assert with_terms["loss"] == pytest.approx(
        with_terms["actor_loss"] + 0.1 * with_terms["ref_kl"] - 0.01 * with_terms["entropy"]
    )


def test_drpo_penalty_metric():
    old = torch.tensor([0.5], dtype=torch.float64).log()
    output = policy_loss(
        {"loss": "drpo", "drpo_epsilon": 0.25, "loss_agg_mode": "token-mean"},
        logp=torch.tensor([0.75], dtype=torch.float64).log(),
        old_logp=old,
        advantages=torch.tensor([-2.0], dtype=torch.float64),
        loss_mask=torch.tensor([True]),
        cu_seqlens=torch.tensor([0, 1]),
    )
    assert merge_metrics([output.metrics])["drpo_penalty_mean"] == pytest.approx(2 * 0.5 * 0.25 / 0.5)


def test_rejected_tokens_are_counted_and_stay_in_the_denominator():
    inputs = on_policy([-1.0, -1.0], [True, True], [2])
    inputs["prox_logp"] = inputs["old_logp"] + torch.tensor([0.0, 2.0], dtype=torch.float64)
    inputs["logp"] = inputs["prox_logp"]
    config = {**LOSSES["icepop"], "loss_agg_mode": "token-mean"}
    output = policy_loss(config, **inputs)
    assert output.loss == 0.5
    assert merge_metrics([output.metrics])["behave_cap_ratio"] == 0.5


def test_a_rounded_certainty_is_not_infinitely_far():
    """A log-prob that rounded to 0 in the sampler against 1 - 1e-7 in the trainer is no reason to drop a token."""
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in on_policy([1.0], [True], [1]).items()}
    inputs |= {"old_logp": torch.zeros(1), "prox_logp": torch.full((1,), -1e-7), "logp": torch.full((1,), -1e-7)}
    config = {"loss": "ppo", "use_decoupled_loss": True, "loss_agg_mode": "token-mean"}
    output = policy_loss({**config, "rejection_sampling": {"metric": "binary_kl", "upper": 1e-4}}, **inputs)
    assert merge_metrics([output.metrics])["behave_cap_ratio"] == 0


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({"loss": "drpo", "drpo_epsilom": 1}, {}, "did you mean 'drpo_epsilon'"),
        ({"loss": "drpo", "loss_agg_mode": "token_mean"}, {}, "did you mean 'token-mean'"),
        ({"loss": "ppo", "use_decoupled_loss": True}, {}, "prox_logp is missing, and use_decoupled_loss=True"),
        ({"loss": "ppo", "kl_coef": 0.1}, {}, "ref_logp is missing, and kl_coef=0.1"),
        ({"loss": "ppo", "entropy_coef": 0.1}, {}, "entropy is missing"),
        ({"loss": "ppo"}, {"advantages": torch.zeros(1)}, r"advantages: found shape \(1,\)"),
        ({"loss": "ppo"}, {"loss_mask": torch.ones(2, 1).bool()}, "loss_mask: found shape"),
        ({"loss": "ppo"}, {"cu_seqlens": torch.tensor([0, 3])}, "cu_seqlens: found 0 to 3"),
        ({"loss": "ppo"}, {"cu_seqlens": torch.tensor([0, 2, 1, 2])}, "cu_seqlens"),
        ({"loss": "ppo"}, {"cu_seqlens": torch.tensor([0.0, 2.0])}, "expected integer"),
    ],
)
def test_what_does_not_fit_is_refused(config, changes, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(config, **{**on_policy([1.0, 1.0], [True, True], [2]), **changes})


def test_a_config_object_and_its_dict_say_the_same():
    inputs = on_policy([1.0, -1.0], [True, True], [2])
    as_object = policy_loss(PolicyLossConfig(loss="spo", spo_epsilon=0.3), **inputs).loss
    assert policy_loss({"loss": "spo", "spo_epsilon": 0.3}, **inputs).loss == as_object


@pytest.mark.parametrize("config", [{"loss": "ppo", "importance_sampling_level": "sequence"}, {"kl_coef": 0.1}])
def test_surrogate_terms_are_refused_where_they_are_not_the_whole_loss(config):
    values = torch.zeros(3)
    with pytest.raises(ValueError, match="not a sum over single tokens without reference KL"):
        surrogate_terms(
            config,
            old_logp=values,
            advantages=values,
            loss_mask=torch.ones(3, dtype=torch.bool),
            cu_seqlens=torch.tensor([0, 3]),
        )
