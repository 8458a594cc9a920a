"""The Triton kernels on a GPU: the tests of every back-end with all tensors there, and sizes of real training."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unirl.algorithms import PolicyLossConfig
from unirl.kernels import backends, fused_policy_loss, token_logprob

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

ROOT = Path(__file__).parents[2]
FILES = ["token_logprob", "policy_loss", "linear_token_logprob", "storage", "token_losses"]
VOCAB = 151_936


def test_every_test_of_a_back_end():
    files = [f"tests/kernels/test_{name}.py" for name in FILES]
    environment = {"UNIRL_TEST_BACKENDS": "triton", "UNIRL_TEST_DEVICE": "cuda"}
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "triton", *files],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-10_000:]


def test_it_is_chosen():
    logits = torch.zeros(1, 8, device="cuda", dtype=torch.bfloat16)
    assert backends.choose_backend("triton", logits).__name__ == "unirl.kernels.triton"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_is_the_same_in_every_batch(dtype):
    """Bit for bit: the first ratio is 1 exactly however the two passes were cut into micro-batches."""
    logits = torch.randn(777, VOCAB, device="cuda").mul_(3).to(dtype)
    targets = torch.randint(VOCAB, (777,), device="cuda")
    whole, _ = token_logprob(logits, targets, temperature=0.6, with_entropy=True, backend="triton")
    for rows in (slice(0, 1), slice(5, 20), slice(300, 777)):
        part, _ = token_logprob(logits[rows], targets[rows], temperature=0.6, backend="triton")
        assert torch.equal(part, whole[rows])


def test_log_probs_at_the_size_of_training():
    logits = torch.randn(512, VOCAB, device="cuda").mul_(3).bfloat16()
    targets = torch.randint(VOCAB, (512,), device="cuda")
    exact = torch.log_softmax(logits.double(), 1).gather(1, targets[:, None])[:, 0]
    logp, _ = token_logprob(logits, targets, backend="triton")
    assert ((logp.double() - exact).abs() <= 1e-6 + 1.2e-7 * exact.abs()).all()


def test_nothing_waits_for_the_gpu():
    """A pass, forward and backward, puts everything in the stream: training queues what comes next meanwhile."""
    rows = 64
    logits = torch.randn(rows, VOCAB, device="cuda").bfloat16()
    targets = torch.randint(VOCAB, (rows,), device="cuda")
    values = torch.randn(3, rows, device="cuda")
    mask = torch.ones(rows, dtype=torch.bool, device="cuda")

    def run() -> None:
        own = logits.clone().requires_grad_()
        found = fused_policy_loss(
            own,
            targets,
            PolicyLossConfig(loss="drpo"),
            old_logp=values[0],
            advantages=values[1],
            weights=values[2],
            loss_mask=mask,
            backend="triton",
        )
        found.loss.backward()

    run()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
