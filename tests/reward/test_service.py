import math
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from unirl.errors import UserError
from unirl.reward import RewardService, service

ACTING = "tests.reward.custom_scorers.ActingScorer"


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def wait_until(condition, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


@pytest.fixture
def acting(tmp_path):
    """A service with a short limit, and a function that lets it act."""
    with RewardService(ACTING, num_workers=2, timeout_s=1.5) as reward:
        records = [{"path": str(tmp_path / str(number))} for number in range(1000)]
        yield reward, lambda *actions: reward.score(actions, records[: len(actions)])


def run_aside(function, *args):
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()
    return thread, results


def test_a_thousand_integers_take_about_a_second():
    with RewardService("math_boxed", num_workers=2, timeout_s=0.5) as reward:
        responses = [rf"It is \boxed{{{number}}}." for number in range(1000)]
        records = [{"answer": number if number % 2 else number + 1} for number in range(1000)]
        reward.score(responses[:2], records[:2])
        start = time.monotonic()
        rewards = reward.score(responses, records)
        assert time.monotonic() - start < 2.0
        assert rewards == [float(number % 2) for number in range(1000)]
        assert reward.stats == service.RewardStats(graded=1000)


def test_a_burst_does_not_time_out_for_waiting(acting):
    reward, act = acting
    assert act(*["sleep 0.01"] * 400) == [1.0] * 400  # 2 s for each worker, over the limit of one answer.
    assert reward.stats.timeouts == reward.stats.worker_restarts == 0


def test_an_answer_over_the_limit_gets_zero_and_its_worker_is_replaced(acting, tmp_path):
    reward, act = acting
    assert act(*["return 0.5"] * 9, "sleep 60", *["return 0.25"] * 30) == [0.5] * 9 + [0.0] + [0.25] * 30
    assert (reward.stats.graded, reward.stats.timeouts, reward.stats.worker_restarts) == (39, 1, 1)
    assert not is_running(int((tmp_path / "9").read_text()))
    assert act("return 1") == [1.0]


def test_a_failed_answer_is_nan_and_told(acting, caplog):
    reward, act = acting
    rewards = act("return 1", "raise", "return nan", "raise", "return 1")
    assert [math.isnan(value) for value in rewards] == [False, True, True, True, False]
    assert (reward.stats.graded, reward.stats.errors, reward.stats.worker_restarts) == (2, 3, 0)
    assert set(reward.stats.messages) == {"KeyError: 'no such thing'", "the scorer returned nan"}
    assert "3 of 5 answers got no verdict" in caplog.text
    assert "KeyError: 'no such thing' (2x)" in caplog.text


def test_an_answer_whose_worker_dies_is_tried_once_more(acting):
    reward, act = acting
    assert act("return 1", "die_once", *["return 1"] * 20) == [1.0] * 22
    assert (reward.stats.errors, reward.stats.worker_restarts) == (0, 1)
    rewards = act("return 1", "die", *["return 1"] * 20)
    assert math.isnan(rewards.pop(1))
    assert rewards == [1.0] * 21
    assert (reward.stats.graded, reward.stats.errors, reward.stats.worker_restarts) == (21, 1, 2)
    assert "died 2 times" in reward.stats.messages[0]


def test_workers_killed_between_calls_are_replaced(acting):
    reward, act = acting
    assert act(*["return 1"] * 4) == [1.0] * 4
    for pid in reward.worker_pids:
        os.kill(pid, signal.SIGKILL)
    assert act(*["return 1"] * 4) == [1.0] * 4
    assert (reward.stats.errors, reward.stats.worker_restarts) == (0, 2)


def test_a_worker_killed_at_work_is_replaced(acting, tmp_path):
    reward, act = acting
    thread, results = run_aside(act, "sleep 1", *["return 1"] * 40)
    wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "0").read_text())
    os.kill(int((tmp_path / "0").read_text()), signal.SIGKILL)
    thread.join()
    assert results == [[1.0] * 41]
    assert (reward.stats.errors, reward.stats.worker_restarts) == (0, 1)


def test_a_stopped_worker_at_work_is_over_the_limit(acting, tmp_path):
    reward, act = acting
    thread, results = run_aside(act, "sleep 0.5", *["return 1"] * 40)
    wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "0").read_text())
    os.kill(int((tmp_path / "0").read_text()), signal.SIGSTOP)
    thread.join()
    assert results == [[0.0] + [1.0] * 40]
    assert (reward.stats.timeouts, reward.stats.worker_restarts) == (1, 1)


@pytest.mark.parametrize("answer_chars", [10, 190_000])
def test_a_stopped_idle_worker_costs_no_answer(tmp_path, monkeypatch, answer_chars):
    monkeypatch.setattr(service, "BEGIN_LIMIT_S", 1.0)
    record = {"path": str(tmp_path / "unused")}
    with RewardService(ACTING, num_workers=2) as reward:
        assert reward.score(["return 1"] * 20, [record] * 20) == [1.0] * 20
        stopped = reward.worker_pids[0]
        os.kill(stopped, signal.SIGSTOP)
        response = "length " + "x" * answer_chars
        assert reward.score([response] * 20, [record] * 20) == [float(answer_chars)] * 20
        assert (reward.stats.timeouts, reward.stats.errors, reward.stats.worker_restarts) == (0, 0, 1)
        assert not is_running(stopped)


def test_workers_ignore_ctrl_c(acting):
    reward, act = acting
    act(*["return 1"] * 4)
    for pid in reward.worker_pids:
        os.kill(pid, signal.SIGINT)
    assert act(*["return 1"] * 40) == [1.0] * 40
    assert reward.stats.worker_restarts == 0


def test_the_service_serves_after_an_interrupted_call(acting):
    _, act = acting

    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            act("sleep 1", "sleep 1", *["return 0"] * 40)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert act(*["return 0.5"] * 40) == [0.5] * 40


def test_a_kill_takes_the_children_of_a_worker_along(acting, tmp_path):
    _, act = acting
    assert act("child") == [0.0]
    child = int((tmp_path / "0").read_text())
    wait_until(lambda: not is_running(child))


def test_close_ends_the_workers(tmp_path):
    reward = RewardService(ACTING, num_workers=3)
    pids = reward.worker_pids
    assert len(pids) == 3
    reward.close()
    reward.close()
    assert not any(map(is_running, pids))
    with pytest.raises(ValueError, match="closed"):
        reward.score(["return 1"], [{"path": ""}])


def test_calls_from_several_threads_take_turns(acting):
    _, act = acting
    calls = [run_aside(act, *[f"return 0.{number}"] * 30) for number in range(1, 5)]
    for number, (thread, results) in enumerate(calls, 1):
        thread.join()
        assert results == [[number / 10] * 30]


def test_long_responses_are_graded_on_their_end():
    with RewardService("math_boxed", num_workers=1, max_response_chars=20) as reward:
        responses = ["x" * 1000 + r"\boxed{42}", r"\boxed{42}" + "x" * 1000]
        assert reward.score(responses, [{"answer": "42"}] * 2) == [1.0, 0.0]


def test_monsters_in_the_service():
    boxes = ["9^9^9^9", "5^{5^{5^{5}}}", "100000!", "42"]
    for scorer in ("math_boxed", "math_verify"):
        with RewardService(scorer, num_workers=1) as reward:
            rewards = reward.score([rf"\boxed{{{box}}}" for box in boxes], [{"answer": "42"}] * 4)
            assert rewards == [0.0, 0.0, 0.0, 1.0]
            assert reward.stats.timeouts == 0


def test_workers_import_no_more_than_the_scorer(acting):
    _, act = acting
    assert act("imported torch", "imported numpy", "imported transformers", "imported pytest") == [0.0] * 4


def test_scorers_say_what_they_grade_against(tmp_path):
    with RewardService("tests.reward.custom_scorers.RecordScorer", num_workers=1) as reward:
        assert reward.score(["a", "b"], [{"metadata": {"target": "a"}}] * 2) == [1.0, 0.0]
    with RewardService("tests.reward.custom_scorers.PlainScorer", num_workers=1) as reward:
        assert reward.score(["3", "4"], [{"answer": 3}] * 2) == [1.0, 0.0]
        assert reward.score([], []) == []
        with pytest.raises(UserError, match="field 'answer', but a prompt record has only solution"):
            reward.score(["3"], [{"solution": "3"}])
        with pytest.raises(ValueError, match="1 responses and 2 records"):
            reward.score(["3"], [{"answer": "3"}] * 2)


def test_an_error_of_the_user_is_raised(acting):
    _, act = acting
    with pytest.raises(UserError, match="mend this"):
        act("return 1", "refuse", *["return 1"] * 40)
    assert act(*["return 0.5"] * 40) == [0.5] * 40


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ("math_box", "no such scorer, expected one of math_boxed, math_verify, reasoning_gym"),
        ("no_such_package.Scorer", "cannot import no_such_package"),
        ("tests.reward.custom_scorers.Missing", "expected a class Missing in .*, found nothing"),
        ("tests.reward.custom_scorers.not_a_class", "found a int"),
        ("tests.reward.custom_scorers.NoScore", "no method score"),
        ("tests.reward.custom_scorers.FailsToStart", "FailsToStart: OSError: no model here"),
        ("tests.reward.custom_scorers.EndsAtStart", "its process could not start: .* ended with exit code 3"),
    ],
)
def test_a_scorer_that_cannot_be_loaded_is_named(scorer, message):
    with pytest.raises(UserError, match=message):
        RewardService(scorer, num_workers=1)


@pytest.mark.parametrize("key", [{"num_workers": 0}, {"timeout_s": 0}, {"max_response_chars": 0}])
def test_settings_are_checked(key):
    with pytest.raises(ValueError, match="above 0"):
        RewardService("math_boxed", **key)
