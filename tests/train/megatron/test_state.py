import os
import pickle
import resource
import threading
from enum import Enum
from pathlib import Path

import pytest
import torch

from tests.train.megatron.conftest import make_batches, weighted_loss
from unirl.errors import UserError
from unirl.train.checkpoint import CheckpointWriteError, DamagedCheckpointError
from unirl.train.megatron import dist_checkpoint
from unirl.train.megatron.state import read_weights

SETTINGS = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 1, "total_steps": 4}


def train(actor, seeds):
    results = []
    for seed in seeds:
        actor.forward_backward(make_batches(seed=seed, token_budget=80), weighted_loss)
        results.append(actor.optimizer_step())
    return results


def assert_same_weights(actor, other):
    for (name, weight), (other_name, other_weight) in zip(actor.export_weights(), other.export_weights(), strict=True):
        assert name == other_name
        assert torch.equal(weight, other_weight), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_and_two_steps_are_four_steps(tmp_path, make_folder, make_actor, dtype):
    folder, _ = make_folder()
    actor = make_actor(folder, dtype=dtype, **SETTINGS)
    train(actor, [1, 2])
    actor.save(tmp_path)
    resumed = make_actor(folder, dtype=dtype, **SETTINGS)
    resumed.load(tmp_path)
    for parameter, other in zip(actor.model.parameters(), resumed.model.parameters(), strict=True):
        shard, loaded = (of.optimizer.shard_of(weight) for of, weight in ((actor, parameter), (resumed, other)))
        assert torch.equal(shard.master, loaded.master)
        assert all(torch.equal(shard.moments[name], loaded.moments[name]) for name in ("exp_avg", "exp_avg_sq", "step"))
    assert train(resumed, [3, 4]) == train(actor, [3, 4])
    assert_same_weights(resumed, actor)


def test_each_save_holds_the_weights_of_its_moment(tmp_path, make_folder, make_actor):
    folder, _ = make_folder()
    actor, other = make_actor(folder, **SETTINGS), make_actor(folder, **SETTINGS)
    for step in range(2):
        place = tmp_path / str(step)
        place.mkdir()
        actor.save(place)  # the first one before any step: there are no moments yet
        other.load(place)
        assert other.optimizer.steps == step
        assert_same_weights(other, actor)
        train(actor, [step])


def test_weights_in_bf16_are_those_that_were_trained(tmp_path, make_folder, make_actor):
    """A checkpoint holds masters alone; a run may go on from it in another dtype."""
    actor = make_actor(make_folder()[0], dtype="bfloat16", **SETTINGS)
    train(actor, [1, 2])
    actor.save(tmp_path)
    trained = dict(actor.export_weights())
    names = {
        "model.norm.weight": "decoder.final_layernorm.weight",
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    }
    stored = dict(read_weights(tmp_path))
    assert all(torch.equal(trained[name], stored[ours]) for name, ours in names.items())
    single = make_actor(make_folder()[0], **SETTINGS)
    single.load(tmp_path)
    assert all(torch.equal(weight.bfloat16(), trained[name]) for name, weight in single.export_weights())
    assert not all(torch.equal(weight, trained[name].float()) for name, weight in single.export_weights())


def test_a_save_in_the_background_is_of_its_moment(tmp_path, make_folder, make_actor, monkeypatch):
    """Two saves with training between them differ, and each is what the weights were; the writer is held meanwhile."""
    may_write, write = threading.Event(), dist_checkpoint._Writer.write

    def held(writer):
        assert may_write.wait(60)
        write(writer)

    monkeypatch.setattr(dist_checkpoint._Writer, "write", held)
    folder, _ = make_folder()
    actor, other = make_actor(folder, **SETTINGS), make_actor(folder, **SETTINGS)
    results, lived = train(actor, [1]), []
    for step in (1, 2):
        place = tmp_path / str(step)
        place.mkdir()
        may_write.clear()
        lived.append(dict(actor.export_weights()))
        actor.begin_save(place)
        results += train(actor, [step + 1])
        assert not actor.save_done()
        with pytest.raises(RuntimeError, match="is not finished"):
            actor.begin_save(place)
        may_write.set()
        actor.finish_save()
        assert actor.save_done()
    assert not torch.equal(lived[0]["model.norm.weight"], lived[1]["model.norm.weight"])
    for step in (1, 2):
        other.load(tmp_path / str(step))
        assert all(torch.equal(weight, lived[step - 1][name]) for name, weight in other.export_weights())
        assert train(other, [step + 1]) == results[step : step + 1]


def test_a_write_that_fails_is_told_and_training_goes_on(tmp_path, make_folder, make_actor):
    actor = make_actor(make_folder()[0], **SETTINGS)
    train(actor, [1])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # stands for the full disk: the same write fails
    try:
        actor.begin_save(tmp_path)
        train(actor, [2])
        with pytest.raises(CheckpointWriteError, match=r"rank 0: .*File too large"):
            actor.finish_save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (tmp_path / "again").mkdir()
    actor.save(tmp_path / "again")
    with pytest.raises(CheckpointWriteError, match="a process that was writing is gone"):
        actor.finish_save()


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_an_index_that_would_run_code_is_refused(tmp_path, make_folder, make_actor, monkeypatch):
    actor = make_actor(make_folder()[0], **SETTINGS)
    actor.save(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DamagedCheckpointError, match=r"is no index of tensors: posix\.system has no place in it"):
        actor.load(tmp_path)
    assert not (tmp_path / "ran").exists()


class EnumsByGetattr(pickle.Pickler):
    """As Python 3.11.0 to 3.11.3 write them."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


class EvilAttribute:
    def __reduce__(self):
        return getattr, (Path, "home")


def test_an_index_of_an_older_python_is_read_and_takes_no_other_attribute(tmp_path, make_folder, make_actor):
    actor = make_actor(make_folder()[0], **SETTINGS)
    actor.save(tmp_path)
    index = pickle.loads((tmp_path / ".metadata").read_bytes())
    with open(tmp_path / ".metadata", "wb") as file:
        EnumsByGetattr(file).dump(index)
    actor.load(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(EvilAttribute()))
    with pytest.raises(DamagedCheckpointError, match=r"has no place in it"):
        actor.load(tmp_path)


def test_loading_into_an_actor_that_has_trained_starts_over(tmp_path, make_folder, make_actor):
    folder, _ = make_folder()
    actor = make_actor(folder, **SETTINGS)
    actor.save(tmp_path)
    first = train(actor, [1, 2])
    actor.load(tmp_path)
    assert train(actor, [1, 2]) == first


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path, make_folder, make_actor):
    make_actor(make_folder("qwen3-tied")[0]).save(tmp_path)
    actor = make_actor(make_folder("qwen2-tied")[0])
    before = dict(actor.export_weights())
    with pytest.raises(UserError, match=r"another model than model\.path.*decoder\.layers\.0"):
        actor.load(tmp_path)
    assert all(torch.equal(weight, before[name]) for name, weight in actor.export_weights())
