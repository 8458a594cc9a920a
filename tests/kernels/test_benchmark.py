"""The benchmark command runs and says what it measured."""

import json
import sys

from benchmarks.kernels import vocab_parallel
from benchmarks.kernels.__main__ import main


def test_small_run(monkeypatch, tmp_path, capsys):
    output = tmp_path / "new" / "kernels.json"
    options = ["--rows", "4", "--vocab", "50", "--repeats", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["kernels", *options])
    main()
    report = json.loads(output.read_text())
    assert {row["rows"] for row in report["results"]} == {4}
    for kernel, ways in (("token_logprob", 3), ("fused_policy_loss", 4), ("linear_token_logprob", 4)):
        rows = [row for row in report["results"] if row["kernel"] == kernel]
        assert {row["candidate"] for row in rows} >= {"eager", "reference", "cpu"}
        assert len(rows) == 4 * ways  # two dtypes, with and without entropy
    assert "V = 50" in capsys.readouterr().out


def test_ranks(monkeypatch, tmp_path):
    """Two processes over gloo."""
    output = tmp_path / "tp2.json"
    options = ["--rows", "4", "--vocab", "50", "--repeats", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["vocab_parallel", *options])
    vocab_parallel.main()
    rows = json.loads(output.read_text())["results"]
    assert [row["candidate"] for row in rows] == 4 * ["eager", "cpu"]
    assert all(row["wall_ms"] > 0 for row in rows)
