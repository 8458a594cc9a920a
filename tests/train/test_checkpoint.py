import errno
import os
import signal
import subprocess
import sys

import pytest

from unirl.errors import UserError
from unirl.train.checkpoint import CheckpointStore


def writer(content):
    return {"actor": lambda folder: (folder / "weights").write_text(content)}


def read(store, iteration):
    found = {}
    state = store.load(iteration, {"actor": lambda folder: found.update(weights=(folder / "weights").read_text())})
    return state, found["weights"]


def test_keeps_the_newest(tmp_path):
    store = CheckpointStore(tmp_path / "c", keep=2)
    assert store.iterations() == []
    for iteration in (1, 2, 10):
        store.save(iteration, {"iteration": iteration}, writer(f"w{iteration}"))
    assert store.iterations() == [2, 10]
    assert read(store, 10) == ({"iteration": 10}, "w10")
    store.save(10, {"iteration": 10}, writer("again"))
    assert read(store, 10)[1] == "again"


def test_failed_save_leaves_the_last_one_whole(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {}, writer("good"))

    def full_disk(folder):
        (folder / "weights").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UserError, match=r"iteration 2 could not be written.*No space left on device"):
        store.save(2, {}, {"actor": full_disk})
    assert store.iterations() == [1]
    assert read(store, 1)[1] == "good"
    assert [entry.name for entry in tmp_path.iterdir()] == ["iteration_00000001"]


KILLED = """
import pathlib, sys, time
from unirl.train.checkpoint import CheckpointStore
store = CheckpointStore(pathlib.Path(sys.argv[1]), keep=1)
store.save(1, {}, {"actor": lambda folder: (folder / "weights").write_text("good")})
def slow(folder):
    (folder / "weights").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
store.save(2, {}, {"actor": slow})
"""


def test_kill_during_a_save_leaves_the_last_one_whole(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    store = CheckpointStore(tmp_path, keep=1)
    assert store.iterations() == [1]
    store.save(3, {}, writer("next"))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["iteration_00000003"]


def test_other_models_than_those_saved_are_refused(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {}, writer("w"))
    with pytest.raises(UserError, match=r"holds actor, this run trains actor, critic: .*algorithm\.critic"):
        store.load(1, {"actor": print, "critic": print})
