import json

import pytest

from unirl.errors import UserError
from unirl.observe.run_dir import RunDirectory


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_existing_run_is_refused_unless_resumed(tmp_path):
    RunDirectory(tmp_path, resume="never").write_metrics(1, {"loss": 0.5})
    with pytest.raises(UserError, match="already holds a run: continue it with resume=auto"):
        RunDirectory(tmp_path, resume="never")
    RunDirectory(tmp_path, resume="auto")


def test_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run_dir=.*file/run cannot be made: Not a directory"):
        RunDirectory(tmp_path / "file" / "run", resume="never")


def test_trim_drops_later_and_torn_lines(tmp_path):
    run = RunDirectory(tmp_path, resume="never")
    for iteration in range(5):
        run.write_metrics(iteration, {"reward/mean": iteration / 10})
        run.write_samples(iteration, [{"response": "é"}, {"response": "b"}])
    with open(run.metrics_path, "a") as file:
        file.write('{"iteration": 2, "torn')
    run.trim(metrics_after=2, samples_after=3)
    assert [line["iteration"] for line in lines(run.metrics_path)] == [0, 1, 2]
    assert [line["iteration"] for line in lines(run.samples_path)] == [0, 0, 1, 1, 2, 2, 3, 3]
    run.write_metrics(3, {"reward/mean": 1.0})
    assert lines(run.metrics_path)[-1] == {"iteration": 3, "reward/mean": 1.0}
