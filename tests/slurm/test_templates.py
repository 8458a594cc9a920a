"""Every template of examples/slurm, submitted to a real Slurm."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.rollout.sglang.conftest import sglang_python  # noqa: F401 - fixture
from tests.slurm.conftest import RECIPE, ROOT, ask_ray
from tests.slurm.fake_slurm import missing_part, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(missing_part() is not None, reason=str(missing_part()))]

ENDLESS = ("num_iterations=1000000", "checkpoint.every=0", "eval.every=0")


def roles(nodes):
    return [node["Labels"]["unirl-role"] for node in nodes]


def gpus(nodes):
    return [node["Resources"]["GPU"] for node in nodes]


def test_flagship_has_64_gpus_on_8_nodes(jobs):
    job = jobs.submit("train_ar", *ENDLESS, ranks=2)
    nodes = job.wait_for_ray(8)
    assert [node["NodeManagerAddress"] for node in nodes] == [f"127.0.0.{i}" for i in range(2, 10)]
    assert gpus(nodes) == [8] * 8
    assert roles(nodes) == ["all"] * 8
    assert sorted(path.name for path in job.folder.glob("*.log")) == [f"n{i}.log" for i in range(1, 9)]
    job.wait_for_training()
    jobs.slurm.run("scancel", job.id)
    assert job.wait()["JobState"] == "CANCELLED"
    job.assert_nothing_is_left()


def test_the_launcher_submits_a_run_and_the_job_ends_with_it(jobs):
    job = jobs.launch("num_iterations=2")
    assert job.wait()["ExitCode"] == "0:0", job.output
    assert job.iterations == [0, 1, 2]
    assert "the driver ended with exit code 0" in job.output
    job.assert_nothing_is_left()


def test_exit_code_of_the_driver_is_that_of_the_job(jobs):
    job = jobs.submit("train_ar_single_node", "seeed=1")
    assert job.wait()["ExitCode"] == "2:0"
    assert "seed" in job.output
    job.assert_nothing_is_left()


def test_two_jobs_on_one_node_do_not_meet(jobs):
    half = ("--gpus-per-node=4", "--cpus-per-gpu=2", "--nodelist=n3")
    first, second = (jobs.submit("train_ar_single_node", *ENDLESS, options=half) for _ in range(2))
    for job in (first, second):
        [node] = job.wait_for_ray(1)
        assert gpus([node]) == [4]
    addresses = [(job.folder / "address").read_text().strip() for job in (first, second)]
    assert len(set(addresses)) == 2
    assert len({ports_of(job) for job in (first, second)}) == 2
    # Not even on purpose: the token of one opens nothing of the other.
    assert ask_ray(addresses[0], second.folder / "token").returncode != 0
    for job in (first, second):
        job.wait_for_training()
        jobs.slurm.run("scancel", job.id)
    for job in (first, second):
        job.wait()
        job.assert_nothing_is_left()


def ports_of(job):
    [path] = job.folder.glob("*.log")
    return re.search(r"ports \d+ to \d+", path.read_text()).group()


@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_rollout_nodes_sample_and_the_others_train(jobs, sglang_python):  # noqa: F811
    job = jobs.submit(
        "train_ar_separate_rollout",
        *(*ENDLESS, "sync.mode=distributed", f"rollout.python={sglang_python}"),
        recipe="ar/arith_drpo_tiny_sglang_cpu",
        ranks=2,
        servers=1,
        options=("--nodes=3",),
        UNIRL_ROLLOUT_NODES="1",
    )
    assert roles(job.wait_for_ray(3)) == ["train", "train", "rollout"]
    job.wait_for_training(600)
    places = dict(re.findall(r"(rank \d+|engine \d+): .*pid \d+ on ([\d.]+)", job.output))
    assert places == {"rank 0": "127.0.0.2", "rank 1": "127.0.0.3", "engine 0": "127.0.0.4"}
    jobs.slurm.run("scancel", job.id)
    job.wait()
    job.assert_nothing_is_left()


def test_components_of_a_heterogeneous_job(jobs):
    job = jobs.submit("train_ar_heterogeneous", *ENDLESS, ranks=2, options=("--nodes=1", ":", "--nodes=1"))
    assert roles(job.wait_for_ray(2)) == ["train", "rollout"]
    job.wait_for_training()
    assert all(f"on {address}" in job.output for address in ("127.0.0.2", "127.0.0.3"))  # where the ranks are
    jobs.slurm.run("scancel", job.id)
    job.wait()
    job.assert_nothing_is_left()


def test_the_job_ends_with_a_node_of_its_ray_cluster(jobs):
    job = jobs.submit("train_ar", *ENDLESS, ranks=2, options=("--nodes=2",), UNIRL_STOP_SECONDS="20")
    job.wait_for_ray(2)
    job.wait_for_training()
    os.kill(raylet_at("127.0.0.3", job), signal.SIGKILL)
    assert job.wait(60)["ExitCode"] == "1:0"  # it would train without end
    assert "Ray on n2 ended with exit code" in job.output
    assert str(job.folder / "n2.log") in job.output
    job.assert_nothing_is_left()


def raylet_at(host, job):
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        line = path.read_bytes().decode(errors="replace")
        if "raylet/raylet" in line and f"--node_ip_address={host}" in line and f"/tmp/unirl-{job.id}-" in line:
            return int(path.parent.name)
    pytest.fail(f"no raylet at {host}")


def test_a_job_near_its_time_limit_saves_and_resumes_when_it_comes_back(jobs, tmp_path):
    recipe = tmp_path / "long.yaml"
    text = (ROOT / "examples" / f"{RECIPE}.yaml").read_text()
    recipe.write_text(text.replace("num_iterations: 50", "num_iterations: 1000000"))
    job = jobs.submit(
        "train_ar_requeue",
        *("checkpoint.every=0", "eval.every=0", f"--config-dir={tmp_path}"),
        recipe="long",
        options=("--nodes=1", "--time=60", "--signal=B:USR1@30"),
    )
    job.wait_for_training()
    # Slurm counts limits in minutes and looks at them every 30 s: the full minute after this one is near.
    set_time_limit(job, minutes=1 + seconds_of(jobs.slurm.job(job.id)["RunTime"]) // 60)
    wait_until(lambda: job.has_said("goes back into the queue"), 120, f"job {job.id} is warned")
    assert "stopped after iteration" in job.output
    trained = job.iterations[-1]
    recipe.write_text(text.replace("num_iterations: 50", f"num_iterations: {trained + 3}"))
    wait_until(lambda: job.state() == "PENDING", 60, f"job {job.id} is in the queue again")
    set_time_limit(job, minutes=60)
    # Slurm would wait for two minutes; within the same second it refuses the job's credential as a revoked one.
    jobs.slurm.run("scontrol", "update", f"JobId={job.id}", "StartTime=now+5seconds")
    ended = job.wait()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), job.output
    assert job.iterations == list(range(trained + 4))
    job.assert_nothing_is_left()


def set_time_limit(job, *, minutes):
    job.jobs.slurm.run("scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes}")


def seconds_of(text):
    """Of a duration as Slurm writes it: 01:02:03."""
    hours, minutes, seconds = map(int, text.split(":"))
    return 3600 * hours + 60 * minutes + seconds
