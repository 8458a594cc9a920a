"""What only the CUDA kernels promise: the order of additions. Everything else they share with the other back-ends."""

import pytest
import torch

from tests.kernels import emulation
from tests.kernels.policy import CONFIGS, token_inputs
from tests.kernels.test_policy_loss import check, rows_of, run
from unirl.kernels import cuda, fused_policy_loss, token_logprob

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    emulation.install(monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1000, 151_936])
def test_a_row_has_one_log_prob_in_every_batch_and_kernel(dtype, width):
    """Bit for bit: one block, or a cluster of 4 (bfloat16) or 8 (float32) of them for a row."""
    logits, targets = rows_of(3, width, width, dtype)
    whole, _ = token_logprob(logits, targets, temperature=0.6, with_entropy=True, backend="cuda")
    alone, _ = token_logprob(logits[1:2], targets[1:2], temperature=0.6, backend="cuda")
    assert torch.equal(alone, whole[1:2])
    inputs = token_inputs(whole) | {"old_logp": whole, "anchor_logp": None, "loss_mask": torch.ones(3).bool()}
    fused, _ = run(logits, targets, CONFIGS["drpo"], inputs, backend="cuda", temperature=0.6)
    assert torch.equal(fused.logp, whole)
    assert (fused.ratio == 1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_for_few_clusters(dtype):
    """Rows that follow each other in one cluster's shared memory, masked ones between them."""
    check("cuda", CONFIGS["ppo"], 21, 40_000, 39_993, 0.7, dtype)


@pytest.mark.parametrize("head", range(8))
def test_every_alignment(head):
    """The row stride is odd, so that each row starts elsewhere in its 16 bytes; edges hold targets and clipped rows."""
    buffer = torch.randn(9, 8 * 40 + 9).bfloat16()
    before = buffer.clone()
    logits = buffer[:, head : head + 8 * 40]
    targets = torch.tensor([0, 1, 2, 318, 319, 7, 8, 317, 160])
    inputs = token_inputs(torch.full((9,), -5.0))
    expected = run(logits.contiguous(), targets, CONFIGS["spo"], inputs, backend="reference", vocab=320)
    own = logits.requires_grad_()
    found = fused_policy_loss(own, targets, CONFIGS["spo"], backend="cuda", vocab=320, **inputs)
    torch.testing.assert_close(found.logp, expected[0].logp, rtol=2e-7, atol=1e-6)
    torch.testing.assert_close(own.detach(), expected[1], rtol=2**-7, atol=1e-6)
    assert torch.equal(buffer.detach()[:, :head], before[:, :head])
    assert torch.equal(buffer.detach()[:, head + 320 :], before[:, head + 320 :])


def test_a_row_that_no_cluster_holds_takes_three_passes(monkeypatch):
    assert cuda._target.row_fits(900_000, True)
    assert cuda._target.row_fits(450_000, False)
    assert not cuda._target.row_fits(1_000_000, True)
    check("cuda", CONFIGS["drpo"], 2, 480_000, 479_999, 0.8, torch.float32)
