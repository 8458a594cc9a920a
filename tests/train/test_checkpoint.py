import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from unirl.errors import UserError
from unirl.train.checkpoint import CheckpointStore, CheckpointWriteError
from unirl.train.manifest import find_damage, sum_of_file


class Model:
    """Weights that are a word, written at once or, where it is begun, when the event says so."""

    def __init__(self, weights: str = "", *, fails: Exception | None = None):
        self.weights, self.fails = weights, fails
        self.may_write = threading.Event()
        self._copy: tuple[Path, str] | None = None

    def save(self, folder):
        self._copy = folder, self.weights
        return self.finish_save()

    def begin_save(self, folder):
        self._copy = folder, self.weights

    def save_done(self):
        return self.may_write.is_set()

    def finish_save(self):
        (folder, weights), self._copy = self._copy, None
        (folder / "weights").write_text(weights)
        if self.fails is not None:
            raise self.fails
        return {"weights": sum_of_file(folder / "weights")}

    def check_files(self, folder, files):
        return find_damage(folder, files)

    def load(self, folder):
        self.weights = (folder / "weights").read_text()


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def read(store, iteration):
    model = Model()
    return store.load(iteration, {"actor": model}), model.weights


def test_keeps_the_newest(tmp_path):
    store = CheckpointStore(tmp_path / "c", keep=2)
    assert store.iterations() == []
    for iteration in (1, 2, 10):
        store.save(iteration, {"iteration": iteration}, {"actor": Model(f"w{iteration}")})
    assert store.iterations() == [2, 10]
    assert read(store, 10) == ({"iteration": 10}, "w10")
    store.save(10, {"iteration": 10}, {"actor": Model("again")})
    assert read(store, 10)[1] == "again"


def test_every_file_is_listed_with_its_checksum(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    folder = store.save(1, {}, {"actor": Model("w"), "critic": Model("v")})
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert sorted(listed) == ["actor/weights", "critic/weights", "state.json"]
    for name, found in listed.items():
        assert subprocess.check_output(["sha256sum", folder / name], text=True).split()[0] == found["sha256"]
        assert (folder / name).stat().st_size == found["size"]


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("failure", [FULL, CheckpointWriteError("rank 1: No space left on device")])
@pytest.mark.parametrize("begun", [False, True])
def test_failed_save_leaves_the_last_one_whole(tmp_path, failure, begun):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {}, {"actor": Model("good")})
    models = {"actor": Model("half", fails=failure), "critic": Model("v")}
    if begun:
        store.begin(2, {}, models)
    with pytest.raises(UserError, match=r"iteration 2 could not be written.*No space left on device"):
        store.finish() if begun else store.save(2, {}, models)
    assert read(store, 1)[1] == "good"
    assert names(tmp_path) == ["iteration_00000001"]
    store.save(3, {}, {"actor": Model("next")})
    assert store.iterations() == [3]


def test_a_begun_save_gets_its_name_when_it_is_done(tmp_path):
    store, actor, critic = CheckpointStore(tmp_path, keep=2), Model("w1"), Model("v1")
    state = {"iteration": 1}
    store.publish()
    store.begin(1, state, {"actor": actor, "critic": critic})
    state["iteration"], actor.weights = 2, "w2"
    actor.may_write.set()
    store.publish()
    assert store.iterations() == []
    with pytest.raises(RuntimeError, match="iteration 1 is not finished"):
        store.begin(2, state, {"actor": actor})
    critic.may_write.set()
    store.publish()
    assert store.iterations() == [1]
    models = {"actor": Model(), "critic": Model()}
    assert store.load(1, models) == {"iteration": 1}
    assert [model.weights for model in models.values()] == ["w1", "v1"]
    store.finish()


KILLED = """
import pathlib, sys, time
from tests.train.test_checkpoint import Model
from unirl.train.checkpoint import CheckpointStore
store = CheckpointStore(pathlib.Path(sys.argv[1]), keep=1)
store.save(1, {}, {"actor": Model("good")})
class Slow(Model):
    def finish_save(self):
        files = super().finish_save()
        print("writing", flush=True)
        time.sleep(60)
store.save(2, {}, {"actor": Slow("half")})
"""


def test_kill_during_a_save_leaves_the_last_one_whole(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    store = CheckpointStore(tmp_path, keep=1)
    assert store.iterations() == [1]
    store.save(3, {}, {"actor": Model("next")})
    assert names(tmp_path) == ["iteration_00000003"]


def test_other_models_than_those_saved_are_refused(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {}, {"actor": Model("w")})
    with pytest.raises(UserError, match=r"holds actor, this run trains actor, critic: .*algorithm\.critic"):
        store.load(1, {"actor": Model(), "critic": Model()})


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "state is gone": lambda folder: (folder / "state.json").unlink(),
    "state is cut off": lambda folder: os.truncate(folder / "state.json", 5),
    "state has another byte": lambda folder: flip_a_byte(folder / "state.json"),
    "manifest is gone": lambda folder: (folder / "manifest.json").unlink(),
    "manifest is cut off": lambda folder: os.truncate(folder / "manifest.json", 60),
    "manifest is of another kind": lambda folder: (folder / "manifest.json").write_text("[]"),
    "models are gone": lambda folder: shutil.rmtree(folder / "actor"),
    "a file of a model is gone": lambda folder: (folder / "actor" / "weights").unlink(),
    "a file of a model has another byte": lambda folder: flip_a_byte(folder / "actor" / "weights"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(tmp_path, damage):
    store, model, said = CheckpointStore(tmp_path, keep=1), Model("before"), []
    assert store.load_newest({"actor": model}, said.append) is None
    CheckpointStore(tmp_path, keep=2).save(1, {"iteration": 1}, {"actor": Model("w1")})
    CheckpointStore(tmp_path, keep=2).save(2, {"iteration": 2}, {"actor": Model("w2")})
    damage(tmp_path / "iteration_00000002")
    assert store.load_newest({"actor": model}, said.append) == {"iteration": 1}
    assert model.weights == "w1"
    assert re.fullmatch(r"checkpoint .*2 is damaged: .+; going back to the checkpoint of iteration 1", said[0])
    store.save(2, {}, {"actor": Model("again")})
    assert names(tmp_path) == ["damaged_iteration_00000002", "iteration_00000002"]


def test_nothing_is_loaded_where_another_model_is_damaged(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    folder = store.save(1, {}, {"actor": Model("w"), "critic": Model("v")})
    flip_a_byte(folder / "critic" / "weights")
    models = {"actor": Model("before"), "critic": Model("before")}
    with pytest.raises(UserError, match=r"critic/weights is not what was written: its checksum differs"):
        store.load(1, models)
    assert models["actor"].weights == "before"


def test_where_no_checkpoint_is_whole_nothing_is_touched(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for iteration in (1, 2):
        store.save(iteration, {}, {"actor": Model("w")})
        (tmp_path / f"iteration_0000000{iteration}" / "state.json").unlink()
    with pytest.raises(UserError, match=r"(?s)02 is damaged.*01 is damaged.*no checkpoint is whole"):
        store.load_newest({"actor": Model()}, print)
    assert store.iterations() == [1, 2]
