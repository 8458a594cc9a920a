import errno
import os
import re
import shutil
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


DAMAGES = {
    "state is gone": lambda folder: (folder / "state.json").unlink(),
    "state is cut off": lambda folder: (folder / "state.json").write_text('{"iter'),
    "models are gone": lambda folder: shutil.rmtree(folder / "actor"),
    "a file of a model is gone": lambda folder: (folder / "actor" / "weights").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(tmp_path, damage):
    store, found, said = CheckpointStore(tmp_path, keep=1), {}, []
    readers = {"actor": lambda folder: found.update(weights=(folder / "weights").read_text())}
    assert store.load_newest(readers, said.append) is None
    CheckpointStore(tmp_path, keep=2).save(1, {"iteration": 1}, writer("w1"))
    CheckpointStore(tmp_path, keep=2).save(2, {"iteration": 2}, writer("w2"))
    damage(tmp_path / "iteration_00000002")
    assert store.load_newest(readers, said.append) == {"iteration": 1}
    assert found == {"weights": "w1"}
    assert re.fullmatch(r"checkpoint .*2 is damaged: .+; going back to the checkpoint of iteration 1", said[0])
    store.save(2, {}, writer("again"))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["damaged_iteration_00000002", "iteration_00000002"]


def test_where_no_checkpoint_is_whole_nothing_is_touched(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for iteration in (1, 2):
        store.save(iteration, {}, writer("w"))
        (tmp_path / f"iteration_0000000{iteration}" / "state.json").unlink()
    with pytest.raises(UserError, match=r"(?s)02 is damaged.*01 is damaged.*no checkpoint is whole"):
        store.load_newest({"actor": print}, print)
    assert store.iterations() == [1, 2]
