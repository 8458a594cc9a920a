"""The CUDA kernels on a GPU: the tests of every back-end with all tensors there, and sizes of real training."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.policy import CONFIGS, token_inputs
from unirl.kernels import cuda, fused_policy_loss, token_logprob

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda.obstacle() is not None, reason=f"back-end cuda: {cuda.obstacle()}"),
]

ROOT = Path(__file__).parents[2]
FILES = ["token_logprob", "policy_loss", "linear_token_logprob", "storage", "token_losses"]
VOCAB = 151_936


def test_every_test_of_a_back_end():
    files = [f"tests/kernels/test_{name}.py" for name in FILES]
    environment = {"UNIRL_TEST_BACKENDS": "cuda", "UNIRL_TEST_DEVICE": "cuda"}
    command = [sys.executable, "-m", "pytest", "-q", "-k", "cuda", *files]
    found = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert found.returncode == 0, found.stdout[-10_000:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_has_one_log_prob_in_every_batch_and_kernel(dtype):
    """Bit for bit, with more rows than clusters: the first ratio is 1 exactly."""
    with torch.device("cuda"):
        logits, targets = torch.randn(777, VOCAB).mul_(3).to(dtype), torch.randint(VOCAB, (777,))
        whole, _ = token_logprob(logits, targets, temperature=0.6, with_entropy=True, backend="cuda")
        for rows in (slice(0, 1), slice(5, 20), slice(300, 777)):
            part, _ = token_logprob(logits[rows], targets[rows], temperature=0.6, backend="cuda")
            assert torch.equal(part, whole[rows])
        inputs = token_inputs(whole) | {"old_logp": whole, "anchor_logp": None}
        own = logits.clone().requires_grad_()
        found = fused_policy_loss(own, targets, CONFIGS["drpo"], temperature=0.6, backend="cuda", **inputs)
    mask = inputs["loss_mask"]
    assert torch.equal(found.logp[mask], whole[mask])
    assert (found.ratio == 1).all()
    assert (own.detach()[~mask] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_gradient_of_plain_torch(dtype):
    with torch.device("cuda"):
        logits, targets = torch.randn(600, VOCAB).mul_(3).to(dtype), torch.randint(VOCAB, (600,))
        logp, _ = token_logprob(logits, targets, backend="cuda")
        inputs = token_inputs(logp)
        gradients = []
        for backend in ("cuda", "reference"):
            own = logits.clone().requires_grad_()
            fused_policy_loss(own, targets, CONFIGS["ppo"], backend=backend, **inputs)
            gradients.append(own.detach())
    torch.testing.assert_close(*gradients, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
