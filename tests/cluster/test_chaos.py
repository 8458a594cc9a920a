"""A short chaos run: `python -m benchmarks.chaos` is the long one."""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.chaos import KINDS, draw_faults, run_chaos
from tests.trainer.conftest import recipe_dir  # noqa: F401 - a fixture

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

ITERATIONS, BATCH_SIZE = 12, 4


@pytest.mark.timeout(580)
def test_a_run_through_random_kills_ends_with_the_same_weights_and_used_every_prompt_once(
    recipe_dir,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    prompts = ({"prompt": f"count {n}", "answer": str(n), "data_source": "letters"} for n in range(100, 148))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    recipe = [
        f"--config-dir={recipe_dir}",
        "--config-name=tiny",
        f"data.path={tmp_path}/prompts.jsonl",
        f"batch_size={BATCH_SIZE}",
        "sampling.num_samples=4",
        "eval.every=0",
    ]
    report = run_chaos(tmp_path, recipe, iterations=ITERATIONS, kills=4, seed=0, heartbeat_s=10)
    assert [name for name, holds in report["verdict"].items() if not holds] == [], report
    kinds = [strike["kind"] for strike in report["strikes"]]
    assert sorted(kinds) == ["controller killed", "rank killed", "rank killed, in a save", "reward worker killed"]
    assert report["controller_starts"] == 2
    assert report["replacements"] >= 1


def test_faults_are_drawn_from_the_seed_and_all_kinds_occur():
    faults = draw_faults(50, 200, seed=3)
    assert faults == draw_faults(50, 200, seed=3) != draw_faults(50, 200, seed=4)
    assert len(faults) == 50
    assert [fault.iteration for fault in faults] == sorted(fault.iteration for fault in faults)
    counts = Counter(fault.kind for fault in faults)
    assert counts.keys() == {fault.kind for group in KINDS for fault in group}
    assert all(faults[n - 1].rank != fault.rank for n, fault in enumerate(faults) if fault.moment == "recovery")
