"""Servers that die or hang in the middle of a batch: nothing is lost, nothing is left behind."""

import signal

import psutil
import pytest

from tests.rollout.sglang.conftest import long_request, perturbed, while_generating

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


def family(engine) -> list[psutil.Process]:
    head = psutil.Process(engine.server_pids[0])
    return [head, *head.children(recursive=True)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_server_is_replaced_and_every_sample_is_whole(published, model, number):
    """Greatest test of seeds: the samples are those of a server that nothing happened to."""
    published.update_weights(perturbed(model), published.weight_version + 1)  # not those that servers start with
    undisturbed = published.generate([long_request()])[0]
    before, old = published.metrics(), family(published)

    def strike() -> None:
        victims = old[2:] if number == signal.SIGKILL else old  # the scheduler, or the whole tree with its guard
        for process in victims:
            process.send_signal(number)

    samples = while_generating(published, long_request(), strike)
    assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in undisturbed]
    assert {version for sample in samples for version in sample.weight_versions} == {published.weight_version}
    after = published.metrics()
    assert after["rollout/server_restarts"] == before["rollout/server_restarts"] + 1
    assert after["rollout/samples_resubmitted"] > before["rollout/samples_resubmitted"]
    assert not [process for process in old if process.is_running()]
