"""Servers that join and leave the pool of an engine: no sample is lost, none is drawn twice, and all are what they
would have been.

Two real servers: the one that all tests of this folder share, and one that is attached to it here.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rollout.sglang.conftest import OVERRIDES, perturbed, weights_of
from tests.rollout.sglang.test_live_sync import Interrupted, attached
from tests.rollout.sglang.test_weights import assert_holds
from tests.slurm.fake_slurm import FakeSlurm, missing_part
from unirl.cluster.__main__ import API_KEY_VARIABLE, main
from unirl.config import compose
from unirl.config.compose import to_yaml
from unirl.rollout.sglang import EngineOptions, Server, SGLangRolloutEngine
from unirl.rollout.sglang.process import ServerProcess
from unirl.sync import DistributedTransfer, TensorTransfer
from unirl.trainer.setup import make_models
from unirl.trainer.sglang_setup import local_servers
from unirl.types import Completion, GenerationRequest, SamplingParams

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

LIMIT_S = 600.0
ROOT = Path(__file__).parents[3]
REQUESTS = [
    GenerationRequest((5, 6, 7), SamplingParams(8), (0,)),  # ends when the others have hardly begun
    *(GenerationRequest((5, 6, 8 + group), SamplingParams(100), tuple(range(16))) for group in range(6)),
]


@pytest.fixture(scope="module")
def run_dir(engine, recipe_dir, tmp_path_factory) -> Iterator[Path]:
    """Of a run, with its config, that has the engine's pool open. It asks no server for a sign of life meanwhile: that
    is a greedy request, and a server draws other tokens for the requests beside one.
    """
    folder = tmp_path_factory.mktemp("pool") / "run"
    folder.mkdir()
    config = compose("tiny", [*OVERRIDES, f"run_dir={folder}"], [recipe_dir])
    (folder / "config.yaml").write_text(to_yaml(config))
    limits = engine._fleet.limits
    engine._fleet.limits = replace(limits, health_interval_s=600.0)
    engine.open_pool(folder / "pool")
    yield folder
    engine.run(engine._pool.close())
    engine._pool = None
    engine._fleet.limits = limits


@pytest.fixture(scope="module")
def second(engine, run_dir, recipe_dir) -> Iterator[ServerProcess]:
    """A server that nobody has attached to yet."""
    config = compose("tiny", [*OVERRIDES, f"run_dir={run_dir}"], [recipe_dir])
    process = ServerProcess(*local_servers(config, recipe_dir / "model", 1))
    try:
        engine.run(until_it_answers(process, config.rollout.start_timeout_s))
        yield process
    finally:
        process.kill()


async def until_it_answers(process: ServerProcess, limit_s: float) -> None:
    visitor = Server(process.url, api_key=process.api_key)
    try:
        await visitor.start(limit_s)
    finally:
        await visitor.stop()


@pytest.fixture
def alone(engine, run_dir, model) -> SGLangRolloutEngine:
    """The engine with one server, which holds other weights than servers start with."""
    for server in engine._fleet.servers[1:]:
        engine.remove_server(server.name)
    engine.update_weights(perturbed(model), engine.weight_version + 1)
    return engine


@pytest.fixture(scope="module")
def expected(engine, run_dir, model) -> list[list[tuple[int, ...]]]:
    """The tokens of REQUESTS from one server that nothing happens to, with those weights."""
    engine.update_weights(perturbed(model), engine.weight_version + 1)
    return tokens(engine.generate(REQUESTS))


@pytest.fixture
def both(alone, second) -> SGLangRolloutEngine:
    """The engine with both servers."""
    alone.add_server(second.url, api_key=second.api_key)
    return alone


def addresses(engine) -> list[str]:
    return [server.address for server in engine._fleet.servers]


def tokens(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in group] for group in groups]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Drawing:
    """Samples of REQUESTS that are drawn in a thread. most: samples that each server had at a time, by URL."""

    def __init__(self, engine: SGLangRolloutEngine):
        self.most: dict[str, int] = {}
        self._engine = engine
        self._result: list[list[list[Completion]]] = []
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._draw)

    def _draw(self) -> None:
        try:
            self._result.append(self._engine.generate(REQUESTS, self._look))
        finally:
            self._begun.set()

    def _look(self, finished: int) -> None:
        for server in self._engine._fleet.servers:
            self.most[server.address] = max(self.most.get(server.address, 0), server.in_flight)
        self._begun.set()

    def result(self) -> list[list[Completion]]:
        self._thread.join(LIMIT_S)
        [groups] = self._result
        return groups

    def __enter__(self) -> "Drawing":
        self._thread.start()
        assert self._begun.wait(LIMIT_S)
        return self

    def __exit__(self, *exc_info) -> None:
        self._thread.join(LIMIT_S)


@contextmanager
def in_background(work: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=work)
    thread.start()
    yield thread
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def joining(engine) -> list[str]:
    """Servers that lack nothing but weights."""
    return [server.address for server in engine._fleet._at_door]


def listed(run_dir, capsys) -> dict[str, dict]:
    """What `list --json` shows, by URL."""
    assert main(["list", "--run-dir", str(run_dir), "--json"]) == 0
    return {server["url"]: server for server in json.loads(capsys.readouterr().out)["servers"]}


def test_a_server_joins_while_samples_are_drawn(alone, expected, run_dir, second, monkeypatch, capsys):
    monkeypatch.setenv(API_KEY_VARIABLE, second.api_key)
    few = replace(alone._fleet.limits, max_concurrency=4)  # so that samples are left when the server has joined
    monkeypatch.setattr(alone._fleet, "limits", few)
    with Drawing(alone) as drawing:
        assert main(["add", "--run-dir", str(run_dir), "--url", second.url]) == 0
    assert f"takes samples at {second.url}" in capsys.readouterr().out
    assert drawing.most[second.url] > 0
    assert tokens(drawing.result()) == expected
    versions = {version for group in drawing.result() for sample in group for version in sample.weight_versions}
    assert versions == {alone.weight_version}
    assert_same_weights(alone)
    assert alone.metrics()["rollout/servers"] == 2


def test_the_pool_is_shown_and_its_keys_are_not(both, run_dir, second, capsys):
    wait_for(lambda: listed(run_dir, capsys).get(second.url, {}).get("state") == "serving")
    shown = listed(run_dir, capsys)[second.url]
    assert (shown["launched"], shown["samples"], shown["restarts"]) == (False, 0, 0)
    assert shown["weight_version"] == both.weight_version
    folder = run_dir / "pool"
    assert {path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir()) if path.is_dir()} == {0o700}
    assert all(second.api_key not in path.read_text() for path in folder.rglob("*") if path.is_file())


def test_what_cannot_be_done_is_said(alone, run_dir, second, capsys):
    [name] = [server.name for server in alone._fleet.servers]
    for command, message in (
        (["remove", name], f"{name} is the only server that is up"),
        (["remove", "server_x"], f"no server server_x in the pool; the nearest is {name}"),
        (["add", "--url", "node7:30000"], "expected the URL of a server, e.g. http://node7:30000"),
        (["add", "--url", alone.endpoints[0][0]], f"is one of the pool already, as {name}"),
        (["add", "--url", second.url], "does not take our requests"),  # without its key
    ):
        assert main([command[0], "--run-dir", str(run_dir), *command[1:]]) == 2
        assert message in capsys.readouterr().err


def test_groups_stay_together_and_servers_are_loaded_alike(both, monkeypatch):
    acquire, chosen = both._fleet.acquire, []

    async def noted(group: int):
        server = await acquire(group)
        chosen.append((group, server.address))
        return server

    monkeypatch.setattr(both._fleet, "acquire", noted)
    both.generate([GenerationRequest((5, 6, 7), SamplingParams(8), (0, 1, 2, 3)) for _ in range(6)])
    homes = dict(chosen)
    assert len(set(chosen)) == 6  # one server for each group
    assert sorted(list(homes.values()).count(url) for url in addresses(both)) == [3, 3]


@pytest.mark.parametrize("limit_s", [LIMIT_S, 0.0])
def test_a_server_leaves_while_samples_are_drawn(both, expected, second, limit_s):
    """In time its samples end there; else they go on elsewhere, with the tokens that they have."""
    before = both.metrics()["rollout/samples_resubmitted"]
    with Drawing(both) as drawing:
        both.remove_server(second.url, limit_s=limit_s)
        assert second.url not in addresses(both)
    assert drawing.most[second.url] > 0
    assert tokens(drawing.result()) == expected
    assert (both.metrics()["rollout/samples_resubmitted"] > before) == (limit_s == 0)


def test_a_server_waits_while_the_others_are_paused(alone, second):
    alone.pause("retract")
    with in_background(lambda: alone.add_server(second.url, api_key=second.api_key)):
        wait_for(lambda: joining(alone) == [second.url])
        assert second.url not in addresses(alone)
        alone.resume()
    assert second.url in addresses(alone)


def test_a_server_waits_while_memory_is_released(alone, second, model):
    alone.release_memory()
    with in_background(lambda: alone.add_server(second.url, api_key=second.api_key)):
        wait_for(lambda: joining(alone) == [second.url])
        alone.update_weights(weights_of(model), alone.weight_version + 1)
        assert second.url in addresses(alone)  # at once: the samples after the update are for both
    [samples] = alone.generate([GenerationRequest((5,), SamplingParams(4), tuple(range(32)))])
    assert {version for sample in samples for version in sample.weight_versions} == {alone.weight_version}


@pytest.fixture
def live(alone, recipe_dir) -> Iterator[SGLangRolloutEngine]:
    """Another engine on the server of `alone`, whose transfer keeps no weights: it takes them from the trainer."""
    transfer = TensorTransfer(bucket_bytes=20_000, timeout_s=LIMIT_S)
    [(url, key)] = alone.endpoints
    options = EngineOptions(checksum_every=1)
    with closing(SGLangRolloutEngine(recipe_dir / "model", [url], transfer, options=options, api_key=key)) as live:
        yield live


def test_weights_that_the_trainer_may_change_are_waited_for(live, second, model):
    """They come with the next update, right after the others'."""
    live.update_weights(perturbed(model), 1)
    with in_background(lambda: live.add_server(second.url, api_key=second.api_key)):
        wait_for(lambda: joining(live) == [second.url])
        assert second.url not in addresses(live)
        live.update_weights(weights_of(model), 2)
        assert second.url in addresses(live)
    assert_same_weights(live)


def test_a_server_joins_and_leaves_in_the_middle_of_a_sync(live, second, model):
    def join() -> None:
        thread.start()
        wait_for(lambda: joining(live) == [second.url])

    def leave() -> None:
        thread.start()
        wait_for(lambda: len(live._fleet._leaving) == 1)

    live.update_weights(weights_of(model), 1)
    thread = threading.Thread(target=live.add_server, args=(second.url,), kwargs={"api_key": second.api_key})
    live.update_weights(Interrupted(perturbed(model), join), 2)
    assert second.url in addresses(live)
    thread.join(LIMIT_S)
    assert_same_weights(live)
    thread = threading.Thread(target=live.remove_server, args=(second.url,))
    live.update_weights(Interrupted(weights_of(model), leave), 3)
    thread.join(LIMIT_S)
    assert second.url not in addresses(live)


def assert_same_weights(engine) -> None:
    first, other = [engine.run(control.checksums(timeout_s=LIMIT_S)) for control in engine.controls]
    assert first == other


def test_two_stages_broadcast_to_two_servers(alone, second, model, recipe_dir, tmp_path):
    """Each stage has a group with both servers; groups that came about in another order would wait for each other."""
    pytest.importorskip("ray")
    options = ["num_devices=2", "parallel.pp=2", "cluster.object_store_gb=0.2", f"run_dir={tmp_path}"]
    models = make_models(compose("tiny", [*OVERRIDES, *options], [recipe_dir]), print)
    transfer = DistributedTransfer(bucket_bytes=20_000, timeout_s=LIMIT_S)
    with closing(models.workers), closing(attached(alone, recipe_dir / "model", transfer)) as rollout:
        rollout.add_server(second.url, api_key=second.api_key)
        rollout.update_weights(perturbed(model), 1)
        for version in (2, 3):  # checksums of both servers are compared
            rollout.update_weights(models.actor.weights, version)
            assert len(rollout.controls) == 2
        assert_holds(rollout, model)


def test_a_server_that_is_killed_is_dropped_and_the_run_goes_on(both, expected, second, model, monkeypatch):
    monkeypatch.setattr(both._fleet, "limits", replace(both._fleet.limits, health_timeout_s=3.0))
    with Drawing(both) as drawing:
        second.kill()
    assert drawing.most[second.url] > 0
    assert tokens(drawing.result()) == expected
    wait_for(lambda: second.url not in addresses(both))
    assert (both._fleet.departed[-1].url, both._fleet.departed[-1].why) == (second.url, "lost")
    both.update_weights(perturbed(model), both.weight_version + 1)
    assert tokens(both.generate(REQUESTS[:1])) == expected[:1]


@pytest.mark.slurm
@pytest.mark.skipif(missing_part() is not None, reason=str(missing_part()))
def test_a_slurm_task_serves_one_run_after_the_other(alone, expected, run_dir, recipe_dir, tmp_path):
    def said() -> str:
        return output.read_text() if output.exists() else ""

    [(url, key)], output = alone.endpoints, tmp_path / "output"
    transfer = TensorTransfer(bucket_bytes=20_000, timeout_s=LIMIT_S)
    alone.run(alone._pool.close())
    with (
        closing(SGLangRolloutEngine(recipe_dir / "model", [url], transfer, api_key=key)) as earlier,
        FakeSlurm(tmp_path / "slurm", num_nodes=2) as slurm,
    ):
        earlier.open_pool(run_dir / "pool")
        job = submit(slurm, output, str(run_dir), f"--limit-s={LIMIT_S}")
        wait_for(lambda: "takes samples at" in said())
        url = addresses(earlier)[1]
        earlier.close()
        alone.open_pool(run_dir / "pool")
        wait_for(lambda: said().count(f"takes samples at {url}") == 2)
        with Drawing(alone) as drawing:
            slurm.run("scancel", "--batch", "--signal=USR1", job)
            wait_for(lambda: url not in addresses(alone))
        assert drawing.most[url] > 0
        assert tokens(drawing.result()) == expected
        assert alone._fleet.departed[-1].why == "removed"
        wait_for(lambda: slurm.job(job)["JobState"] == "COMPLETED")
    assert said().rstrip().endswith("the server is stopped")


def submit(slurm: FakeSlurm, output: Path, *arguments: str) -> str:
    """The id of the job of `rollout_pool.sbatch ARGUMENTS`, an array of one task."""
    script = str(ROOT / "examples" / "slurm" / "rollout_pool.sbatch")
    options = ("--array=0", f"--output={output}", f"--chdir={ROOT}")
    environment = {"UNIRL_PYTHON": sys.executable, "UNIRL_ROOT": str(ROOT)}
    return slurm.run("sbatch", "--parsable", *options, script, *arguments, **environment).strip()
