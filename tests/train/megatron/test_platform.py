import megatron.core
import pytest
import torch

from unirl.train.megatron import platform

CUDA_FREE = pytest.mark.skipif(torch.cuda.is_available(), reason="asks what a machine without CUDA answers")


def test_megatron_core_is_a_release_that_is_adapted():
    """A new release: read through platform.py (each piece says what it replaces), then change the version there."""
    assert megatron.core.__version__ in platform.MEGATRON_VERSIONS


def test_another_release_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "_installed", False)
    monkeypatch.setattr(megatron.core, "__version__", "0.99.0")
    with pytest.raises(RuntimeError, match=r"adapts megatron-core 0\.16\.1 and 0\.19\.2, found 0\.99\.0"):
        platform.install_cpu_platform()


def test_megatron_gets_a_torch_of_its_own_and_torch_stays_as_it_is():
    before = dict(vars(torch)), dict(vars(torch.cuda)), torch.Tensor.type
    platform.install_cpu_platform()
    platform.install_cpu_platform()
    assert (dict(vars(torch)), dict(vars(torch.cuda)), torch.Tensor.type) == before
    from megatron.core.optimizer import clip_grads

    assert clip_grads.torch is not torch
    assert clip_grads.torch.zeros(2, device="cuda").device.type == "cpu"
    assert clip_grads.torch.cuda.current_device() == torch.device("cpu")
    assert clip_grads.torch.nn is torch.nn
    assert torch.ones(1).type() == "torch.FloatTensor"


@CUDA_FREE
def test_torch_itself_still_refuses_cuda():
    platform.install_cpu_platform()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
