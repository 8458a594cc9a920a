"""Two ends of a pool folder that speak with each other, and what neither listens to."""

import asyncio
import json
import os
import socket
import threading
import time
from dataclasses import asdict, replace

import pytest

from unirl.errors import UserError
from unirl.observe.pool_folder import LONGEST_SILENCE_S, PoolFolder, Presence, Reply, Request, RunEndedError

SERVER = {"name": "server_0", "url": "http://127.0.0.1:1", "state": "serving"}


@pytest.fixture
def folder(tmp_path):
    folder = PoolFolder(tmp_path / "run" / "pool")
    folder.open()
    folder.show(Presence("one", "/model", [SERVER], []))
    return folder


def answer_next(folder: PoolFolder, run_id: str, reply: Reply) -> threading.Thread:
    def answer() -> None:
        deadline = time.monotonic() + 120
        while not (requests := folder.take_requests(run_id)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        folder.reply(requests[0], reply)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


@pytest.mark.parametrize("reply", [Reply(True, "it is in"), Reply(False, "it is not")])
def test_a_request_is_answered_and_leaves_no_trace(folder, reply):
    request = Request("one", "add", {"url": "http://127.0.0.1:2", "api_key": "secret"})
    assert "secret" not in repr(request)
    thread = answer_next(folder, "one", reply)
    if reply.done:
        assert asyncio.run(folder.ask(request, timeout_s=120)) == "it is in"
    else:
        with pytest.raises(UserError, match="it is not"):
            asyncio.run(folder.ask(request, timeout_s=120))
    thread.join()
    assert [path.name for path in folder.path.rglob("*") if path.is_file()] == ["run.json"]


def test_nobody_else_can_look(folder):
    (folder.path / "requests" / "x.json").write_text("{}")
    folder.show(Presence("one", "/model", [], []))
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder.path, *folder.path.glob("*")))
    folder.path.chmod(0o755)
    folder.open()
    assert folder.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("made", ["link", "file"])
def test_a_folder_that_is_not_ours_is_refused(tmp_path, made):
    path = tmp_path / "pool"
    if made == "link":
        (tmp_path / "theirs").mkdir()
        path.symlink_to(tmp_path / "theirs")
    else:
        path.write_text("")
    with pytest.raises(UserError, match="is not a folder of this user"):
        PoolFolder(path).open()
    with pytest.raises(UserError, match="is not a folder of this user"):
        asyncio.run(PoolFolder(path).ask(Request("one", "add", {}), timeout_s=1))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(folder):
    os.chown(folder.path, 65534, 65534)
    with pytest.raises(UserError, match="is not a folder of this user"):
        folder.open()


def test_what_was_asked_of_an_earlier_run_is_not_done(folder):
    question = folder.path / "requests" / "a.json"
    for text in (json.dumps(asdict(Request("another", "remove", {}))), "{", "[]", '{"run_id": "one"}'):
        question.write_text(text)
        assert folder.take_requests("one") == []
        assert not question.exists()
    question.write_text("{}")
    folder.open()
    assert not question.exists()


def test_a_run_that_ends_or_says_nothing_is_not_waited_for(folder):
    with pytest.raises(UserError, match="has not answered within 0 s"):
        asyncio.run(folder.ask(Request("one", "add", {}), timeout_s=0))
    with pytest.raises(RunEndedError):
        asyncio.run(folder.ask(Request("earlier", "add", {}), timeout_s=120))
    folder.close()
    with pytest.raises(RunEndedError):
        asyncio.run(folder.ask(Request("one", "add", {}), timeout_s=120))
    assert list((folder.path / "requests").iterdir()) == []


def test_a_run_lives_while_it_gives_signs_of_life(folder):
    present = folder.presence()
    assert (present.servers, present.host, present.pid) == ([SERVER], socket.gethostname(), os.getpid())
    long_ago = present.written_at - LONGEST_SILENCE_S - 1
    for dead in (replace(present, written_at=long_ago), replace(present, pid=2**22 + 1)):  # above the largest pid
        folder.show(dead)
        assert folder.presence() is None
    folder.show(replace(present, host="elsewhere", pid=2**22 + 1))
    assert folder.presence() is not None
