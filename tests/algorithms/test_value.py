"""The value loss: against float64 written out, its closed form, splits, what is dropped; statistics of values."""

import math

import pytest
import torch

from tests.algorithms.batches import MODES, random_batch
from unirl.algorithms import (
    count_denominators,
    merge_metrics,
    value_loss,
    value_loss_derivative,
    value_statistics,
)

CONFIGS = [{"value_clip": clip, "loss_agg_mode": mode, "horizon": 16} for clip in (0.5, 0.1, None) for mode in MODES]


def random_inputs(lengths=(5, 0, 7, 1, 4), seed=0, dtype=torch.float64) -> dict[str, torch.Tensor]:
    batch = random_batch(lengths, seed)
    values = {"values": batch.logp, "old_values": batch.old_logp, "returns": batch.advantages}
    values = {name: value.to(dtype) for name, value in values.items()}
    return {**values, "loss_mask": batch.loss_mask, "cu_seqlens": batch.cu_seqlens}


def reference(config, values, old_values, returns, loss_mask, cu_seqlens) -> float:
    """Token by token in Python's floats, as the formula says."""
    sequences = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        losses = []
        for t in range(start, end):
            if not loss_mask[t]:
                continue
            value, old, target = values[t].item(), old_values[t].item(), returns[t].item()
            clip = math.inf if config["value_clip"] is None else config["value_clip"]
            clipped = min(max(value, old - clip), old + clip)
            losses.append(0.5 * max((value - target) ** 2, (clipped - target) ** 2))
        if losses:
            sequences.append(losses)
    sums = [sum(losses) for losses in sequences]
    match config["loss_agg_mode"]:
        case "token-mean":
            return sum(sums) / sum(map(len, sequences))
        case "seq-mean-token-sum":
            return sum(sums) / len(sequences)
        case "seq-mean-token-mean":
            return sum(s / len(losses) for s, losses in zip(sums, sequences, strict=True)) / len(sequences)
        case "seq-mean-token-sum-norm":
            return sum(sums) / config["horizon"] / len(sequences)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_loss_is_the_formula(config, dtype, tolerance):
    exact = random_inputs()
    found = value_loss(config, **random_inputs(dtype=dtype))
    assert found.loss.dtype == dtype
    assert found.loss.item() == pytest.approx(reference(config, **exact), rel=tolerance)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_closed_form_derivative_is_what_autograd_says(config):
    for seed in range(4):
        inputs = random_inputs(seed=seed)
        inputs["values"].requires_grad_()
        (gradient,) = torch.autograd.grad(value_loss(config, **inputs).loss, inputs["values"])
        assert gradient.any()
        torch.testing.assert_close(value_loss_derivative(config, **inputs), gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_splitting_over_micro_batches_changes_nothing(mode):
    config = {"loss_agg_mode": mode, "horizon": 16}
    whole = random_inputs()
    denominators = count_denominators(whole["loss_mask"], whole["cu_seqlens"])
    outputs, gradients = [], []
    for bounds in ([0, 5, 5], [5, 12], [12, 13, 17]):
        part = {name: value[bounds[0] : bounds[-1]] for name, value in whole.items() if name != "cu_seqlens"}
        part["cu_seqlens"] = torch.tensor(bounds) - bounds[0]
        outputs.append(value_loss(config, **part, denominators=denominators))
        gradients.append(value_loss_derivative(config, **part, denominators=denominators))
    torch.testing.assert_close(sum(o.loss for o in outputs), value_loss(config, **whole).loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat(gradients), value_loss_derivative(config, **whole), rtol=0, atol=1e-12)
    merged = merge_metrics([output.metrics for output in outputs])
    assert merged == pytest.approx(merge_metrics([value_loss(config, **whole).metrics]), abs=1e-12)


def test_a_value_beyond_the_clip_is_pushed_back_and_not_on():
    """Returns 2; old values 0: a value of 1 has moved too far already, a value of -1 has moved the wrong way."""
    inputs = {
        "values": torch.tensor([1.0, -1.0, 0.25]),
        "old_values": torch.zeros(3),
        "returns": torch.full((3,), 2.0),
        "loss_mask": torch.ones(3, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, 3]),
    }
    output = value_loss({"value_clip": 0.5}, **inputs)
    torch.testing.assert_close(output.per_token, torch.tensor([1.125, 4.5, 1.53125]))
    torch.testing.assert_close(value_loss_derivative({}, **inputs), torch.tensor([0.0, -3.0, -1.75]) / 3)
    assert merge_metrics([output.metrics])["value_clipfrac"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", ["values", "old_values", "returns"])
def test_a_value_that_is_not_finite_is_dropped_and_counted(name):
    inputs = random_inputs()
    expected = value_loss_derivative({}, **inputs)
    token = int(inputs["loss_mask"].nonzero()[3])
    expected[token] = 0
    masked = int((~inputs["loss_mask"]).nonzero()[0])
    inputs[name][token] = inputs[name][masked] = math.nan
    inputs["values"].requires_grad_()
    output = value_loss({}, **inputs)
    (gradient,) = torch.autograd.grad(output.loss, inputs["values"])
    torch.testing.assert_close(gradient, expected)
    assert merge_metrics([output.metrics])["value_nonfinite_tokens"] == 1


def test_what_is_refused():
    inputs = random_inputs()
    with pytest.raises(ValueError, match="value_clip: found 0, expected a number > 0"):
        value_loss({"value_clip": 0}, **inputs)
    with pytest.raises(ValueError, match="horizon: found null"):
        value_loss({"loss_agg_mode": "seq-mean-token-sum-norm"}, **inputs)
    with pytest.raises(ValueError, match=r"returns: found shape \(2,\)"):
        value_loss({}, **{**inputs, "returns": torch.zeros(2)})


def test_statistics():
    returns = torch.tensor([0.0, 1.0, 2.0, math.nan, 9.0])
    mask = torch.tensor([True, True, True, True, False])
    perfect = value_statistics(returns, returns, mask)
    assert perfect == {"values/mean": 1.0, "returns/mean": 1.0, "explained_variance": 1.0}
    constant = value_statistics(torch.full((5,), 0.3), returns, mask)
    assert constant["explained_variance"] == pytest.approx(0.0)
    # returns - values = [0, 0.5, 1]: a quarter of the variance is left
    assert value_statistics(returns / 2, returns, mask)["explained_variance"] == pytest.approx(0.75)


def test_statistics_where_they_are_not_defined():
    equal = value_statistics(torch.rand(3), torch.full((3,), 0.1), torch.ones(3, dtype=torch.bool))
    assert equal["explained_variance"] is None
    nothing = value_statistics(torch.rand(3), torch.rand(3), torch.zeros(3, dtype=torch.bool))
    assert set(nothing.values()) == {None}
