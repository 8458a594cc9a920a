"""`python -m unirl.demo`: trains with the real command and shows what the run left."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import unirl
from unirl.config import compose
from unirl.demo.__main__ import LLM, TINY, main, next_steps, unused
from unirl.demo.record import RunRecord, read_run
from unirl.demo.show import show_run

ROOT = Path(unirl.__file__).parent.parent


def test_a_short_demo(base_model, tmp_path):
    small = ["num_iterations=2", "batch_size=4", "sampling.num_samples=2", "eval.max_prompts=8", "eval.num_samples=2"]
    small += ["data.size=64", "data.heldout_size=16", "checkpoint.every=0", f"model.path={base_model}"]
    command = [sys.executable, "-m", "unirl.demo", "--seed", "3", *small]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for expected in (
        "iteration 0",
        "iteration 2",
        "eval/chain_sum/avg@2",
        "reward/mean",
        "runs/demo-1",
        "algorithm=grpo",
    ):
        assert expected in done.stdout
    record = read_run(tmp_path / "runs/demo-1")
    assert [line["iteration"] for line in record.evaluations] == [0, 2]
    assert len(record.curve("reward/mean")) == 2
    assert "seed: 3" in (tmp_path / "runs/demo-1/config.yaml").read_text()


def test_a_typo_is_told_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["num_iteration=3"]) == 2
    assert "num_iterations" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_each_demo_gets_a_run_directory_of_its_own(tmp_path):
    prefix = str(tmp_path / "runs/demo")
    for number in (1, 2, 3):
        assert unused(prefix) == f"{prefix}-{number}"
        Path(unused(prefix)).mkdir(parents=True)


def record_of(before: float, after: float) -> RunRecord:
    metrics = [{"iteration": 0, "eval/sums/avg@8": before, "eval/sums/pass@8": 0.5}]
    metrics += [
        {"iteration": number, "reward/mean": number / 40, "response/length_mean": 7.0} for number in range(1, 41)
    ]
    metrics[-1] |= {"eval/sums/avg@8": after, "eval/sums/pass@8": 1.0}
    sample = {"eval": True, "prompt": "<|im_start|>user\n1 + 2 =<|im_end|>\n<|im_start|>assistant\n"}
    samples = [
        {**sample, "iteration": 0, "sample_id": 0, "response": "\\boxed{3}", "reward": 1.0},
        {**sample, "iteration": 0, "sample_id": 8, "response": "[red]\\boxed{9}", "reward": 0.0},
        {**sample, "iteration": 40, "sample_id": 0, "response": "\\boxed{3}", "reward": 1.0},
        {**sample, "iteration": 40, "sample_id": 8, "response": "1+2=3. \\boxed{3}", "reward": 1.0},
    ]
    return RunRecord(metrics, samples)


def shown(record: RunRecord) -> str:
    console = Console(record=True, width=120, file=io.StringIO())
    show_run(record, console)
    return console.export_text()


def test_what_is_shown_of_a_run():
    text = shown(record_of(before=0.125, after=0.9))
    assert "0.125" in text
    assert "0.900" in text
    assert "│ 1 + 2 = " in text, "the question alone, without the chat's marks"
    assert "iteration   0: [red]\\boxed{9}   (wrong)" in text
    rows = [line for line in text.splitlines() if "7.0 tokens" in line]
    assert len(rows) == 12
    assert "│         1 │" in rows[0]
    assert "│        40 │" in rows[-1]


@pytest.mark.parametrize("lines", [0, 1])
def test_a_run_without_evaluations_or_samples_is_shown_too(tmp_path, lines):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "reward/mean": None}) + "\n" if lines else "")
    assert shown(read_run(tmp_path)) == ""


def test_the_next_steps_go_on_with_the_same_run():
    overrides = ["seed=4", "run_dir=runs/demo-9", "+num_iterations=6"]
    config = compose(TINY.recipe, overrides, purpose="plan")
    text = next_steps(TINY, config, overrides)
    assert "unirl.demo seed=4 run_dir=runs/demo-9 num_iterations=12 resume=auto" in text
    assert "--seed 5" in text
    assert "make demo-llm" in text
    assert "unirl.demo --llm --seed 5" in next_steps(LLM, config, overrides)
