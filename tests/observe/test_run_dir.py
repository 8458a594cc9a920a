import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

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


NOBODY = 65534


@pytest.fixture
def as_an_ordinary_user():
    """Root writes everywhere: a test run by root goes on as nobody."""
    effective = os.geteuid()
    if effective == 0:
        os.seteuid(NOBODY)
    yield
    os.seteuid(effective)


def test_folder_that_is_read_only_is_named(as_an_ordinary_user):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        run.mkdir()
        RunDirectory(run, resume="never")
        run.chmod(0o555)
        with pytest.raises(UserError, match=r"run_dir=.*run cannot be written: mend its rights"):
            RunDirectory(run, resume="never")


def test_config_that_changes_is_told(tmp_path):
    run = RunDirectory(tmp_path, resume="never")
    before = "seed: 0\nrun_dir: a\noptimizer:\n  lr: 0.2\n  betas: [0.9, 0.99]\n"
    assert run.write_config(before) == []
    assert run.write_config(before.replace("run_dir: a", "run_dir: b")) == []
    changed = "seed: 1\nrun_dir: a\noptimizer:\n  lr: 0.1\n  betas: [0.9, 0.99]\n  eps: 1\n"
    assert run.write_config(changed) == [
        "seed: 1, before 0",
        "optimizer.lr: 0.1, before 0.2",
        "optimizer.eps: 1, before None",
    ]
    assert (tmp_path / "config.yaml").read_text() == changed
    for damaged in (b"seed: [", b"\xff\xfe\x00", b"", b"- seed"):
        (tmp_path / "config.yaml").write_bytes(damaged)
        assert run.write_config(changed) == ["what stood in config.yaml could not be read"]


def test_trim_drops_later_and_torn_lines(tmp_path):
    run = RunDirectory(tmp_path, resume="never")
    for iteration in range(5):
        run.write_metrics(iteration, {"reward/mean": iteration / 10})
        run.write_samples(iteration, [{"response": "é"}, {"response": "b"}])
    with open(run.metrics_path, "a") as file:
        file.write('{"iteration": 2, "torn')
    assert run.trim(trained=3, finished=2) == []
    assert [line["iteration"] for line in lines(run.metrics_path)] == [0, 1, 2]
    assert [line["iteration"] for line in lines(run.samples_path)] == [0, 0, 1, 1, 2, 2, 3, 3]
    run.write_metrics(3, {"reward/mean": 1.0})
    assert lines(run.metrics_path)[-1] == {"iteration": 3, "reward/mean": 1.0}


def test_trim_drops_the_samples_of_an_evaluation_that_is_repeated(tmp_path):
    run = RunDirectory(tmp_path, resume="never")
    for iteration in (0, 1):
        run.write_samples(iteration, [{"response": "trained"}])
        run.write_samples(iteration, [{"eval": True, "response": "evaluated"}])
    run.trim(trained=1, finished=0)
    assert [(line["iteration"], line["response"]) for line in lines(run.samples_path)] == [
        (0, "trained"),
        (0, "evaluated"),
        (1, "trained"),
    ]


@pytest.mark.parametrize("broken", [b"\0\0\0\n", b"[1]\n", b"{}\n", b'{"iteration": 1, "lo\n', b"\xff\n"])
def test_trim_tells_of_lines_that_cannot_be_read(tmp_path, broken):
    run = RunDirectory(tmp_path, resume="never")
    run.write_metrics(0, {})
    with open(run.metrics_path, "ab") as file:
        file.write(broken)
    run.write_metrics(2, {})
    (said,) = run.trim(trained=2, finished=2)
    assert said.endswith("metrics.jsonl: 1 of 3 lines could not be read and are dropped")
    assert [line["iteration"] for line in lines(run.metrics_path)] == [0, 2]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
def test_full_disk_is_named(tmp_path):
    run = RunDirectory(tmp_path, resume="never")
    run.metrics_path.symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"metrics\.jsonl could not be written: No space left on device; make room"):
        run.write_metrics(1, {"loss": 0.5})


def test_config_that_cannot_be_written_is_named(tmp_path):
    run = RunDirectory(tmp_path, resume="never")
    (tmp_path / ".config.yaml.tmp").mkdir()
    with pytest.raises(UserError, match=r"config\.yaml could not be written: Is a directory"):
        run.write_config("seed: 1")


HOLDS = """
import sys, time
from unirl.observe.run_dir import RunDirectory
run = RunDirectory(sys.argv[1], resume="auto")
print("held", flush=True)
time.sleep(60)
"""


def test_a_folder_in_use_is_refused_until_its_holder_is_gone(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    for resume in ("auto", "never"):
        with pytest.raises(UserError, match=rf"is in use by process {holder.pid} on .+: wait for it or stop it"):
            RunDirectory(tmp_path, resume=resume)
    holder.kill()
    holder.wait()
    with RunDirectory(tmp_path, resume="auto"), pytest.raises(UserError, match=rf"in use by process {os.getpid()} on"):
        RunDirectory(tmp_path, resume="auto")
    RunDirectory(tmp_path, resume="auto").close()


def test_a_secret_of_the_environment_is_not_saved_and_the_folder_is_its_users_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "sk-0123456789abcdef")
    run = RunDirectory(tmp_path / "run", resume="never")
    for _ in range(2):
        assert run.write_config("environment_args:\n  key: sk-0123456789abcdef\n  tokens: 12\n") == []
    saved = (run.path / "config.yaml").read_text()
    assert saved == "environment_args:\n  key: ${oc.env:JUDGE_API_KEY}\n  tokens: 12\n"
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
