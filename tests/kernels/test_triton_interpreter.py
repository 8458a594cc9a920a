"""The Triton kernels in Triton's interpreter: the tests of every back-end again, and the audit, without a GPU.

Triton must know that it interprets before it is imported, hence a process of its own.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

ROOT = Path(__file__).parents[2]
FILES = ["token_logprob", "policy_loss", "linear_token_logprob", "storage", "token_losses", "vocab_parallel"]
# Without what takes many rows, each some milliseconds, and is about the code around the kernels.
CHOSEN = "(triton or vocab_parallel) and not (threads or memory or adds_up or any_split)"


def interpreted(*arguments: str, **environment: str) -> str:
    """Output of `python -m ARGUMENTS`; fails with it where the command does."""
    found = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-10_000:] + found.stderr[-2000:]
    return found.stdout


def test_values_and_gradients():
    files = [f"tests/kernels/test_{name}.py" for name in FILES]
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", "-k", CHOSEN]
    output = interpreted("pytest", *options, *files, UNIRL_TEST_BACKENDS="triton")
    assert "skipped" not in output


def test_audit():
    output = interpreted("unirl.audit", "kernels", "--backend", "triton")
    assert "0 failed" in output
