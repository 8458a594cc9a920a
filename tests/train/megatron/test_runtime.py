import pytest
import torch.distributed as dist

from unirl.config.schema import ParallelConfig
from unirl.errors import UserError
from unirl.train.megatron.runtime import ParallelRuntime


def test_the_last_holder_takes_the_process_group_down():
    first, second = (ParallelRuntime(ParallelConfig(), seed=0) for _ in range(2))
    first.close()
    first.close()
    assert dist.is_initialized()
    second.close()
    assert not dist.is_initialized()


def test_another_layout_beside_an_open_one_is_refused():
    with ParallelRuntime(ParallelConfig(), seed=0), pytest.raises(RuntimeError, match="close that one first"):
        ParallelRuntime(ParallelConfig(tp=2), seed=0)
    assert not dist.is_initialized()


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="WORLD_SIZE=2"):
        ParallelRuntime(ParallelConfig(), seed=0)


def test_an_actor_that_cannot_be_made_leaves_nothing_open(make_folder, make_actor):
    folder, _ = make_folder()
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError):
        make_actor(folder)
    assert not dist.is_initialized()
