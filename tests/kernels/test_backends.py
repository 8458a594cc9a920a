"""Which back-end runs, and what is refused with which words."""

import warnings

import pytest
import torch

from unirl.kernels import BackendUnavailable, available_backends, backends, cpu, reference, token_logprob

LOGITS, TARGETS = torch.zeros(2, 3), torch.tensor([0, 1])


def test_auto_takes_the_cpp_kernels_for_what_they_can():
    assert {"reference", "cpu"} <= set(available_backends())
    for dtype in (torch.float32, torch.bfloat16):
        assert backends.choose_backend("auto", LOGITS.to(dtype)) is cpu
    for dtype in (torch.float64, torch.float16):
        assert backends.choose_backend("auto", LOGITS.to(dtype)) is reference


def test_environment_and_argument(monkeypatch):
    monkeypatch.setenv("UNIRL_KERNEL_BACKEND", "reference")
    assert backends.choose_backend("auto", LOGITS) is reference
    assert backends.choose_backend("cpu", LOGITS) is cpu
    monkeypatch.setenv("UNIRL_KERNEL_BACKEND", "cpus")
    with pytest.raises(
        ValueError, match=r"'cpus': expected auto or one of reference, cpu, triton, cuda .*UNIRL_KERNEL_BACKEND"
    ):
        backends.choose_backend("auto", LOGITS)


def test_a_named_backend_never_gives_way():
    with pytest.raises(BackendUnavailable, match=r"cpu cannot take torch\.float64 logits"):
        token_logprob(LOGITS.double(), TARGETS, backend="cpu")
    with pytest.raises(ValueError, match="unknown kernel back-end 'rocm'"):
        token_logprob(LOGITS, TARGETS, backend="rocm")


def test_without_the_extension(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "_LIBRARY", tmp_path / "none.so")
    monkeypatch.setattr(backends, "_warned", set())
    cpu.is_built.cache_clear()
    try:
        with pytest.warns(UserWarning, match="build_ext --inplace"):
            assert backends.choose_backend("auto", LOGITS) is reference
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert backends.choose_backend("auto", LOGITS) is reference  # one warning, not one per call
        with pytest.raises(BackendUnavailable, match="not built"):
            backends.choose_backend("cpu", LOGITS)
        assert available_backends() == ["reference"]
    finally:
        cpu.is_built.cache_clear()


@pytest.mark.parametrize("level", ["sse9", "AVX2"])
def test_unknown_instruction_set(monkeypatch, level):
    monkeypatch.setenv("UNIRL_CPU_ISA", level)
    with pytest.raises(RuntimeError, match=f"UNIRL_CPU_ISA={level}: expected generic, avx2 or avx512"):
        token_logprob(LOGITS, TARGETS, backend="cpu")


@pytest.mark.parametrize(
    ("logits", "targets", "options", "error", "words"),
    [
        (torch.zeros(3), TARGETS, {}, ValueError, r"logits \[T, V_local\]"),
        (LOGITS, torch.tensor([0]), {}, ValueError, r"got \(2, 3\) and \(1,\)"),
        (LOGITS.int(), TARGETS, {}, TypeError, "floating logits"),
        (LOGITS, TARGETS.int(), {}, TypeError, "int64 targets"),
        (LOGITS, TARGETS, {"temperature": 0.0}, ValueError, "temperature=0.0"),
        (LOGITS, TARGETS, {"temperature": float("nan")}, ValueError, "temperature=nan"),
        (LOGITS, TARGETS, {"vocab": 4}, ValueError, "vocab=4 does not fit"),
        (LOGITS, TARGETS, {"vocab": 0}, ValueError, "vocab=0 does not fit"),
        (LOGITS, torch.tensor([0, 3]), {}, ValueError, r"\[0, 3\]: expected \[0, 3\)"),
        (LOGITS, torch.tensor([-100, 1]), {}, ValueError, "any valid id"),
        (LOGITS, torch.tensor([0, 2]), {"vocab": 2}, ValueError, r"expected \[0, 2\)"),
        (torch.zeros(3, 2).T, TARGETS, {}, ValueError, "stride 1 along the vocabulary"),
        (torch.zeros(1, 3).expand(2, 3), TARGETS, {}, ValueError, "do not overlap"),
    ],
)
def test_refusals(logits, targets, options, error, words):
    with pytest.raises(error, match=words):
        token_logprob(logits, targets, **options)
