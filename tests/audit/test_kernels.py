"""The audit of the kernels, as users run it."""

import torch

from unirl.audit import kernels
from unirl.audit.__main__ import main
from unirl.audit.kernels import run_checks


def test_every_kernel_of_this_machine_passes():
    checks = list(run_checks())
    assert [check for check in checks if not check.passed] == []
    assert {check.backend for check in checks} == {"reference", "cpu"}
    names = {check.kernel for check in checks}
    assert names >= {"token_logprob", "linear_token_logprob", "fused_policy_loss drpo", "fused_policy_loss ppo"}
    assert max(check.error for check in checks) > 0


def test_the_command_prints_a_table_and_fails_where_a_kernel_does(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "SIZES", kernels.SIZES[:3])
    monkeypatch.setattr(kernels, "HEAD_SIZES", kernels.HEAD_SIZES[:1])
    monkeypatch.setattr(kernels, "LOSS_SIZES", ())
    assert main(["kernels", "--backend", "cpu"]) == 0
    assert "26 passed, 0 failed" in capsys.readouterr().out
    monkeypatch.setitem(kernels.TOLERANCES[torch.float32], "value", 1e-12)
    assert main(["kernels", "--backend", "cpu"]) == 1
    output = capsys.readouterr().out
    assert "24 passed, 2 failed" in output
    (failure,) = [line for line in output.splitlines() if "NO" in line]
    assert all(word in failure for word in ("token_logprob", "cpu", "float32", "63 x 11", "1.0e-12"))


def test_a_back_end_that_is_not_there(capsys):
    assert main(["kernels", "--backend", "abacus"]) == 2
    assert "unknown kernel back-end 'abacus'" in capsys.readouterr().err
