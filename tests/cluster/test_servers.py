"""A run whose trainer is on one node of a Ray cluster and whose SGLang server is on another."""

import importlib.util
import os
import re
import signal
import subprocess

import psutil
import pytest

from tests.cluster.fake_cluster import fake_cluster
from tests.cluster.test_run import read_until
from tests.rollout.sglang.conftest import sglang_python  # noqa: F401 - fixture
from tests.trainer.conftest import (  # noqa: F401 - fixtures
    ENVIRONMENT,
    command,
    read_metrics,
    recipe_dir,
    wait_for_lines,
)

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

SPLIT = [
    *("num_devices=2", "devices_per_node=1", "cluster.layout=split", "rollout.num_devices=1", "num_iterations=3"),
    *("rollout.engine=sglang", "rollout.device=cpu", "rollout.start_timeout_s=500", "rollout.max_total_tokens=4096"),
    *("sync.mode=distributed", "sync.checksum_every=1", "eval.every=0", "checkpoint.every=0"),
]


@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_a_server_on_another_node_is_revived_there(sglang_python, command, tmp_path):  # noqa: F811
    run_dir = tmp_path / "run"
    with fake_cluster(tmp_path, roles=(None, None), num_gpus=1) as (cluster, addresses):
        options = [*SPLIT, f"cluster.address={cluster.address}"]
        environment = {**ENVIRONMENT, "RAY_AUTH_TOKEN_PATH": os.environ["RAY_AUTH_TOKEN_PATH"]}
        with subprocess.Popen(
            command(run_dir, *options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as driver:
            assert f"on {addresses[0]}" in read_until(driver, "rank 0: ")
            found = re.search(r"pid (\d+) on ([\d.]+) \(\w+\), devices 0", read_until(driver, "engine 0: "))
            assert found[2] == addresses[1]
            wait_for_lines(run_dir, 1, driver, limit_s=600)
            host = psutil.Process(int(found[1]))
            server = host.children(recursive=True)
            [listening] = {
                f"{link.laddr.ip}" for process in server for link in process.net_connections() if is_http(link, process)
            }
            assert listening == addresses[1]
            assert not [word for process in server for word in process.cmdline() if "api-key" in word]
            host.send_signal(signal.SIGKILL)
            output = driver.communicate(timeout=600)[0]
        assert driver.returncode == 0, output
    psutil.wait_procs(server, timeout=120)
    assert not [process for process in server if process.is_running()]
    lines = read_metrics(run_dir)[1:]
    assert [line["weight_version"] for line in lines] == [0, 1, 2]
    assert lines[-1]["rollout/server_restarts"] == 1
    assert all(line["rollout_replay_logp_absdiff_max"] < 1e-4 for line in lines)


def is_http(link, process) -> bool:
    """Whether this is where the server takes requests."""
    return link.status == psutil.CONN_LISTEN and f"--port {link.laddr.port}" in " ".join(process.cmdline())
