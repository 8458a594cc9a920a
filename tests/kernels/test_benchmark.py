"""The benchmark command runs and says what it measured."""

import json
import sys

from benchmarks.kernels.__main__ import main


def test_small_run(monkeypatch, tmp_path, capsys):
    output = tmp_path / "new" / "kernels.json"
    options = ["--rows", "4", "--vocab", "50", "--repeats", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["kernels", *options])
    main()
    report = json.loads(output.read_text())
    assert report["rows"] == 4
    assert {row["candidate"] for row in report["results"]} == {"eager", "reference", "cpu"}
    assert len(report["results"]) == 12
    assert "T = 4, V = 50" in capsys.readouterr().out
