"""Servers that die or hang in the middle of a batch: nothing is lost, nothing is left behind."""

import signal

import psutil
import pytest

from tests.rollout.sglang.conftest import perturbed, requests_in_progress, while_generating
from unirl.errors import UserError
from unirl.rollout.sglang import FleetLimits, ServerOptions, SGLangRolloutEngine
from unirl.sync import DiskTransfer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


def family(engine) -> list[psutil.Process]:
    head = psutil.Process(engine.server_pids[0])
    return [head, *head.children(recursive=True)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_server_is_replaced_and_every_sample_is_whole(published, model, number):
    """Greatest test of seeds: the samples are those of a server that nothing happened to."""
    published.update_weights(perturbed(model), published.weight_version + 1)  # not those that servers start with
    undisturbed = published.generate(requests_in_progress())[1]
    before, old = published.metrics(), family(published)

    def strike() -> None:
        victims = old[2:] if number == signal.SIGKILL else old  # the scheduler, or the whole tree with its guard
        for process in victims:
            process.send_signal(number)

    samples = while_generating(published, strike)
    assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in undisturbed]
    assert {version for sample in samples for version in sample.weight_versions} == {published.weight_version}
    after = published.metrics()
    assert after["rollout/server_restarts"] == before["rollout/server_restarts"] + 1
    assert after["rollout/samples_resubmitted"] > before["rollout/samples_resubmitted"]
    assert not [process for process in old if process.is_running()]


def test_a_server_that_does_not_start_is_explained(sglang_python, recipe_dir, tmp_path):
    model = str(recipe_dir / "model")
    wrong = {"attention_backend": "nonsense"}
    options = ServerOptions(sglang_python, model, "float32", tmp_path / "server.log", arguments=wrong)
    transfer = DiskTransfer(tmp_path / "weights", bucket_bytes=1, timeout_s=1)
    with pytest.raises(
        UserError, match=r"the SGLang server did not start: .*ended; the end of .*server\.log:(.|\n)*nonsense"
    ):
        SGLangRolloutEngine(model, [options], transfer)


def test_a_url_without_a_server_is_explained(recipe_dir, tmp_path):
    transfer = DiskTransfer(tmp_path / "weights", bucket_bytes=1, timeout_s=1)
    limits = FleetLimits(start_timeout_s=1)
    with pytest.raises(
        UserError, match=r"did not start: not ready after 1 s: http://127\.0\.0\.1:9/health: Cannot connect"
    ):
        SGLangRolloutEngine(recipe_dir / "model", ["http://127.0.0.1:9"], transfer, limits=limits)
