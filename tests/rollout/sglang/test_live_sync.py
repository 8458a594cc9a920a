"""Weights that a real server is given by tensor and by broadcast, from one process and from ranks of a trainer."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.rollout.sglang.conftest import OVERRIDES, perturbed, weights_of, while_generating
from tests.rollout.sglang.test_weights import REQUEST, assert_holds
from unirl.config import compose
from unirl.rollout.sglang import EngineOptions, FleetLimits, SGLangRolloutEngine, WeightSyncError
from unirl.rollout.weights import LocalWeights
from unirl.sync import DiskTransfer, DistributedTransfer, TensorTransfer
from unirl.sync.shared_memory import FOLDER
from unirl.trainer.setup import make_models
from unirl.types import GenerationRequest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

TRANSFERS = {"tensor": TensorTransfer, "distributed": DistributedTransfer}
IN_BUCKETS = [f"{mode} in buckets" for mode in TRANSFERS]
"""As to a server that takes no stream: a request for each bucket."""
BUCKET_BYTES = 20_000
LIMIT_S = 120.0


def attached(engine: SGLangRolloutEngine, model_path, transfer) -> SGLangRolloutEngine:
    """Another engine on the server of `engine`."""
    [(url, key)] = engine.endpoints
    options = EngineOptions(checksum_every=1)
    return SGLangRolloutEngine(
        model_path, [url], transfer, limits=FleetLimits(max_concurrency=16), options=options, api_key=key
    )


@pytest.fixture
def silent(engine) -> Iterator[SGLangRolloutEngine]:
    """The engine, which asks its server for no sign of life: that is a greedy request, and a server draws other tokens
    for the requests beside one.
    """
    engine.run(engine._fleet.keep_quiet())
    yield engine
    engine._fleet.end_quiet()


@pytest.fixture(params=TRANSFERS)
def live(silent, recipe_dir, request) -> Iterator[SGLangRolloutEngine]:
    transfer = TRANSFERS[request.param.split()[0]](bucket_bytes=BUCKET_BYTES, timeout_s=LIMIT_S)
    live = attached(silent, recipe_dir / "model", transfer)
    [server] = live._fleet.servers
    assert server.info.streams
    server.info = replace(server.info, streams=request.param not in IN_BUCKETS)
    yield live
    live.close()


def shared_memory() -> list[str]:
    """Names of what this process has of it."""
    return [path.name for path in FOLDER.glob(f"torch_{os.getpid()}_*")]


class Interrupted:
    """The weights, with `act` done when half of them have been sent."""

    num_stages = 1

    def __init__(self, weights: list[tuple[str, torch.Tensor]], act: Callable[[], None]):
        self._weights, self._act = weights, act
        self.num_times = 0

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        return ((name, tuple(tensor.shape)) for name, tensor in self._weights)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.num_times += 1
        for number, (name, tensor) in enumerate(self._weights):
            if self.num_times == 1 and number == len(self._weights) // 2:
                self._act()
            yield name, tensor.detach()

    def feed(self, consume, stage: int):
        return consume(iter(self))


@pytest.mark.parametrize("live", [*TRANSFERS, *IN_BUCKETS], indirect=True)
def test_new_weights_are_sampled_from_and_do_not_drift(live, model):
    live.update_weights(perturbed(model), 1)
    assert live.metrics()["sync/gb_per_s"] > 0
    other = live.generate([REQUEST])
    found = []
    for version in range(2, 12):
        live.update_weights(LocalWeights(lambda: weights_of(model)), version)
        [[sample]] = live.generate([GenerationRequest(REQUEST.prompt_ids, REQUEST.params, (0,))])
        assert sample.weight_versions == (version,) * 24
        found.append((sample.token_ids, sample.log_probs))
    assert found == [found[0]] * 10
    assert_holds(live, model)
    live.update_weights(perturbed(model), 12)
    assert [sample.token_ids for sample in live.generate([REQUEST])[0]] == [sample.token_ids for sample in other[0]]


@pytest.mark.parametrize("mode", [None, "in_place"])
def test_an_update_between_the_tokens_of_a_sample(live, model, mode):
    live.update_weights(perturbed(model), 1)

    def update() -> None:
        if mode is not None:
            live.pause(mode)
        live.update_weights(weights_of(model), 2)
        if mode is not None:
            live.resume()

    samples = while_generating(live, update)
    crossing = [sample for sample in samples if set(sample.weight_versions) == {1, 2}]
    assert crossing
    assert all(list(sample.weight_versions) == sorted(sample.weight_versions) for sample in crossing)
    assert all(len(sample.token_ids) == 100 for sample in samples)
    assert_holds(live, model)  # no prefix is left of the old weights


@pytest.mark.parametrize("fault", ["missing", "not in the model", "wrong shape", "given twice"])
def test_weights_of_another_model_reach_no_server(live, model, fault):
    live.update_weights(weights_of(model), 1)
    weights = perturbed(model)
    if fault == "missing":
        weights = weights[:-1]
    elif fault == "not in the model":
        weights.append(("model.extra.weight", torch.zeros(2)))
    elif fault == "wrong shape":
        weights[3] = (weights[3][0], weights[3][1][:-1])
    else:
        weights.append(weights[0])
    with pytest.raises(ValueError, match=fault):
        live.update_weights(weights, 2)
    source = Interrupted(weights, lambda: None)  # of ranks; known from the update before
    with pytest.raises(ValueError, match=fault):
        live.update_weights(source, 2)
    assert source.num_times == 0
    assert live.weight_version == 1
    assert_holds(live, model)


@pytest.mark.parametrize("live", IN_BUCKETS, indirect=True)
def test_a_server_that_rejects_a_bucket_keeps_nobody_waiting(live, model):
    """Its session is ended in the middle: it answers, and does not take part in the broadcast."""
    live.update_weights(weights_of(model), 1)

    def end_session() -> None:
        control = live.controls[0]
        live.run(control.end_weight_update(timeout_s=60))

    check_refusal(live, Interrupted(perturbed(model), end_session))
    live.update_weights(weights_of(model), 3)
    assert_holds(live, model)


def test_a_server_that_rejects_a_stream_keeps_nobody_waiting(live, model, monkeypatch):
    live.update_weights(weights_of(model), 1)

    async def begin(server) -> None:
        """No session."""

    with monkeypatch.context() as patch:
        patch.setattr(live._publisher._transfer, "_begin", begin)
        check_refusal(live, LocalWeights(lambda: perturbed(model)))
    live.update_weights(weights_of(model), 3)
    assert_holds(live, model)


def check_refusal(live: SGLangRolloutEngine, weights) -> None:
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"refused the weights: .* must run between begin_weight_update"):
        live.update_weights(weights, 2)
    assert time.monotonic() - started < LIMIT_S / 2
    assert shared_memory() == []
    with pytest.raises(WeightSyncError, match="the last weight update failed"):
        live.generate([REQUEST])


def test_a_trainer_that_fails_in_the_middle_leaves_no_server_waiting(live, model):
    live.update_weights(weights_of(model), 1)

    def fail() -> None:
        raise RuntimeError("a rank was lost")

    started = time.monotonic()
    with pytest.raises(RuntimeError, match="a rank was lost"):
        live.update_weights(Interrupted(perturbed(model), fail), 2)
    assert shared_memory() == []
    live.update_weights(weights_of(model), 3)
    assert time.monotonic() - started < LIMIT_S / 2
    assert_holds(live, model)


@pytest.mark.parametrize("live", [*TRANSFERS, "distributed in buckets"], indirect=True)
def test_a_server_outlives_a_trainer_that_is_killed_in_the_middle(live, model, recipe_dir, request):
    [(url, key)] = live.endpoints
    mode = request.node.callspec.params["live"]
    trainer = multiprocessing.get_context("spawn").Process(
        target=die_in_the_middle, args=(recipe_dir / "model", url, key, mode.split()[0], mode not in IN_BUCKETS)
    )
    trainer.start()
    trainer.join(LIMIT_S)
    assert trainer.exitcode == -signal.SIGKILL
    started = time.monotonic()
    live.update_weights(weights_of(model), 2)
    assert time.monotonic() - started < LIMIT_S / 2
    assert live.metrics()["rollout/server_restarts"] == 0
    assert_holds(live, model)


def die_in_the_middle(model_path, url: str, key: str, mode: str, streams: bool) -> None:
    transfer = TRANSFERS[mode](bucket_bytes=BUCKET_BYTES, timeout_s=LIMIT_S)
    engine = SGLangRolloutEngine(model_path, [url], transfer, api_key=key)
    [server] = engine._fleet.servers
    server.info = replace(server.info, streams=streams)
    weights = list(load_file(model_path / "model.safetensors").items())
    engine.update_weights(LocalWeights(lambda: weights), 1)
    engine.update_weights(Interrupted(weights, lambda: os.kill(os.getpid(), signal.SIGKILL)), 2)


def test_a_paused_server_sleeps(silent):
    """It leaves its core to the trainer."""
    [scheduler] = [process for process in server_processes(silent) if "scheduler" in " ".join(process.cmdline())]
    silent.pause("retract")
    try:
        before = sum(scheduler.cpu_times()[:2])
        time.sleep(3)
        assert sum(scheduler.cpu_times()[:2]) - before < 1.0
    finally:
        silent.resume()


def test_memory_is_released_until_the_next_update(live, model):
    live.update_weights(weights_of(model), 1)
    live.release_memory()
    with pytest.raises(RuntimeError, match="memory is released"):
        live.generate([REQUEST])
    live.update_weights(weights_of(model), 2)
    assert_holds(live, model)


@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_every_mode_from_two_ranks_of_a_trainer(silent, model, recipe_dir, tmp_path, layout):
    pytest.importorskip("ray")
    options = ["num_devices=2", f"parallel.{layout}=2", "cluster.object_store_gb=0.2", f"run_dir={tmp_path}"]
    models = make_models(compose("tiny", [*OVERRIDES, *options], [recipe_dir]), print)
    limits = {"bucket_bytes": BUCKET_BYTES, "timeout_s": LIMIT_S}
    transfers = [DiskTransfer(tmp_path / "weights", **limits), *(make(**limits) for make in TRANSFERS.values())]
    try:
        for transfer in transfers:
            rollout = attached(silent, recipe_dir / "model", transfer)
            rollout.update_weights(perturbed(model), 1)
            for version in (2, 3):
                rollout.update_weights(models.actor.weights, version)
            assert_holds(rollout, model)
            rollout.close()
    finally:
        models.workers.close()


@pytest.mark.parametrize(
    ("number", "mode"),
    [(signal.SIGKILL, "distributed"), (signal.SIGSTOP, "distributed"), (signal.SIGSTOP, "tensor")],
)
def test_a_server_lost_in_the_middle_is_revived_with_the_new_weights(engine, model, monkeypatch, number, mode):
    """A stopped one is missed when its time is over."""
    limit_s = LIMIT_S if number == signal.SIGKILL else 20.0
    monkeypatch.setattr(engine._publisher, "_transfer", TRANSFERS[mode](bucket_bytes=BUCKET_BYTES, timeout_s=limit_s))
    monkeypatch.setattr(engine._fleet, "limits", replace(engine._fleet.limits, health_timeout_s=10.0))
    restarts, old = engine.metrics()["rollout/server_restarts"], server_processes(engine)

    def strike() -> None:
        for process in old:
            if "scheduler" in process.name() or "scheduler" in " ".join(process.cmdline()):
                process.send_signal(number)

    engine.update_weights(Interrupted(weights_of(model), strike), engine.weight_version + 1)
    assert engine.metrics()["rollout/server_restarts"] > restarts
    assert not [process for process in old if process.is_running()]
    assert_holds(engine, model)


def server_processes(engine: SGLangRolloutEngine) -> list[psutil.Process]:
    return psutil.Process(engine.server_pids[0]).children(recursive=True)
