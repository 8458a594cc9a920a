"""`python -m unirl.cluster` where there is no pool to change. With a pool: tests/rollout/sglang/test_pool.py."""

import asyncio
import json
import subprocess
import sys

import pytest

from unirl.cluster.__main__ import main
from unirl.cluster.serve import ServeOptions, launch_options, serve
from unirl.config import compose
from unirl.config.compose import to_yaml
from unirl.errors import UserError
from unirl.observe.pool_folder import PoolFolder, Presence

SERVER = {
    "name": "server_0",
    "url": "http://127.0.0.1:30000",
    "state": "serving",
    "launched": True,
    "samples": 3,
    "weight_version": None,
    "restarts": 1,
}


def write_config(run_dir, *overrides: str) -> None:
    config = compose("ar/arith_drpo_tiny_sglang_cpu", [f"run_dir={run_dir}", *overrides], purpose="print")
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))


@pytest.fixture
def run_dir(tmp_path):
    """Of a run that lives: of this process."""
    path = tmp_path / "run"
    write_config(path, "rollout.python=" + sys.executable, "sync.mode=tensor", "rollout.tp=1")
    folder = PoolFolder(path / "pool")
    folder.open()
    folder.show(Presence("one", str(tmp_path), [SERVER], []))
    return path


def options(run_dir, host=None) -> ServeOptions:
    return ServeOptions(run_dir, host, limit_s=1, wait_s=0)


def test_help_names_all_commands():
    result = subprocess.run(
        [sys.executable, "-m", "unirl.cluster", "serve", "--help"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0
    assert "SIGTERM, SIGUSR1 or Ctrl-C" in result.stdout


@pytest.mark.parametrize("command", [["list"], ["add", "--url", "http://127.0.0.1:1"], ["remove", "x"], ["serve"]])
def test_a_folder_without_a_run(tmp_path, command, capsys):
    command = [*command, "--run-dir", str(tmp_path), *(["--wait-s", "0"] if command == ["serve"] else [])]
    assert main(command) == 2
    assert "holds no run (no config.yaml)" in capsys.readouterr().err


def test_a_run_that_has_ended(run_dir, capsys):
    PoolFolder(run_dir / "pool").close()
    assert main(["list", "--run-dir", str(run_dir)]) == 2
    assert f"no run lives in {run_dir}: it has ended" in capsys.readouterr().err


def test_the_native_engine_has_no_servers(tmp_path, capsys):
    write_config(tmp_path, "rollout.engine=native", "sync.mode=inprocess")
    assert main(["list", "--run-dir", str(tmp_path)]) == 2
    assert "the native engine has no servers" in capsys.readouterr().err


def test_the_pool_is_listed(run_dir, capsys):
    assert main(["list", "--run-dir", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["servers"] == [SERVER]
    assert main(["list", "--run-dir", str(run_dir)]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "server_0" in line]
    assert [cell.strip() for cell in line.split("│")[1:-1]][3:] == ["serving", "3", "-", "1"]


def test_a_key_file_that_is_not_there(run_dir, tmp_path, capsys):
    key = f"--api-key-file={tmp_path / 'key'}"
    assert main(["add", "--run-dir", str(run_dir), "--url", "http://127.0.0.1:1", key]) == 2
    assert f"{key} cannot be read: No such file" in capsys.readouterr().err


def test_a_server_is_launched_as_the_run_launches_its_own(run_dir, tmp_path):
    presence = PoolFolder(run_dir / "pool").presence()
    launch = launch_options(options(run_dir), presence)
    assert (launch.host, launch.model_path, launch.gpus) == ("127.0.0.1", str(tmp_path), ())
    assert launch.deterministic
    assert launch.log_path.parent == run_dir / "logs"
    assert launch_options(options(run_dir, host="10.0.0.7"), presence).host == "10.0.0.7"


@pytest.mark.parametrize(
    ("presence", "message"),
    [
        (
            Presence("one", "/", [], [], host="node1"),
            "sync.mode=tensor reaches servers on the run's machine alone, node1",
        ),
        (Presence("one", "/no/such/model", [], []), "does not see the run's model, /no/such/model"),
    ],
)
def test_a_server_that_could_not_serve_is_not_started(run_dir, presence, message):
    with pytest.raises(UserError, match=message):
        launch_options(options(run_dir), presence)


def test_serve_waits_for_a_run_and_no_longer(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        asyncio.run(serve(options(tmp_path), print))
