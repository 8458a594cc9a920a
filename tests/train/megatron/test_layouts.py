"""Every family in parallel, on four processes, against transformers."""

import functools

import pytest
import torch

from tests.train.megatron.conftest import (
    assert_gradients_close,
    make_batches,
    make_reference,
    reference_gradients,
    reference_log_probs,
    weighted_loss,
)
from tests.train.megatron.layouts import CASES


@functools.cache
def reference(family: str):
    """(log-probs by position in the part, gradients) by transformers."""
    model = make_reference(family)
    (batch,) = make_batches()
    logp, entropy = reference_log_probs(model, batch, 1.0)
    weighted_loss(batch, logp, entropy)[0].backward()
    return dict(zip(batch.token_positions.tolist(), logp.tolist(), strict=True)), reference_gradients(model)


@pytest.mark.parametrize("case", CASES)
def test_log_probs_equal_those_of_transformers(ran_layouts, case):
    expected, _ = reference(CASES[case][0])
    found = {}
    for report in ran_layouts[2]:
        for positions, logp in report[case]["train"]["log_probs"]:
            found |= dict(zip(positions.tolist(), logp.tolist(), strict=True))
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_of_transformers(ran_layouts, case):
    _, expected = reference(CASES[case][0])
    assert_gradients_close(ran_layouts[2][0][case]["train"]["gradients"], expected)


@pytest.mark.parametrize("case", CASES)
def test_the_norm_counts_every_gradient_once(ran_layouts, case):
    _, expected = reference(CASES[case][0])
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm().item()
    for report in ran_layouts[2]:
        assert report[case]["train"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
