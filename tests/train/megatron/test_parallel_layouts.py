"""Every layout of ranks gives what one process gives: the default audit, and experts split over tensor-parallel ranks.

All layouts of one number of ranks run on one group of real processes.
"""

import pytest
import torch

from unirl.audit.parallel.cases import default_cases
from unirl.audit.parallel.layouts import DEFAULT, parse_layouts
from unirl.audit.parallel.run import audit
from unirl.audit.parallel.train import train_jobs
from unirl.config.schema import ParallelConfig

LAYOUTS = f"{DEFAULT},dp=2+overlap,ep=2+tp=2+sp"


@pytest.fixture(scope="module")
def rows():
    return {row.layout.name: row for row in audit(parse_layouts(LAYOUTS), timeout_s=600)}


@pytest.mark.parametrize("layout", LAYOUTS.split(","))
def test_a_layout_changes_nothing(rows, layout):
    row = rows[layout]
    assert (row.skipped, row.error) == (None, None)
    assert len(row.cases) == (2 if "ep" in layout else 11)
    for case, differences in row.cases.items():
        beyond = {quantity: found for quantity, found in differences.items() if not found.passed}
        assert not beyond, case


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The outcomes in one process, by name."""
    cases = [case for experts in (False, True) for case in default_cases(tmp_path_factory.mktemp("m"), experts=experts)]
    return {case.name: train_jobs([(case, ParallelConfig())], 1)[0] for case in cases}


def test_the_cases_are_hard_enough(alone):
    """Gradients everywhere and all of them clipped, weights that move, ratios beyond the clip, tokens rejected."""
    for outcome in alone.values():
        assert all(gradient.abs().max() > 1e-6 for gradient in outcome.gradients.values())
        assert all(metrics["grad_norm"] > 0.05 for metrics in outcome.metrics)
        assert outcome.token_values["logp"].isnan().any()
    first = {name: outcome.metrics[0] for name, outcome in alone.items()}
    for name in ("ppo with KL", "gspo", "spo with KL, shared prompts", "dppo with entropy, chunked logits", "cispo"):
        assert 0.05 < first[name]["clip_ratio"] < 0.95
    for name in ("tokens rejected", "sequences rejected, two updates"):
        assert 0.2 < first[name]["behave_cap_ratio"] < 0.8
    assert first["drpo"]["drpo_penalty_mean"] > 0.001
    assert first["ppo with a critic"]["value_loss"] > 0.01


def test_old_and_new_log_probs_are_equal_whatever_their_packing(alone):
    """Both passes have micro-batches of their own; on-policy the first update finds a KL of 0."""
    for metrics in alone["on-policy drpo of sequences"].metrics:
        assert metrics["approx_kl_abs"] < 1e-6
        assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    for outcome in alone.values():
        for name in ("logp", "entropy"):
            found, expected = (outcome.token_values[f"{name}{label}"] for label in (", packed otherwise", ""))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0, equal_nan=True)
