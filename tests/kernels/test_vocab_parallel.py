"""Vocabulary-parallel log-probs on real gloo groups of 2 and 4 ranks, and the algebra of combining shards."""

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.dense import assert_gradient, assert_values, dense
from tests.kernels.vocab_parallel_rank import CASES, WORLD, Case, run_rank
from unirl.kernels import reference
from unirl.kernels.records import VocabShard, combine


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(run_rank, args=(str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(WORLD)]


def _assert_product(found: torch.Tensor, expected: torch.Tensor, size: torch.Tensor, dtype: torch.dtype) -> None:
    """Gradients after the head's matrix product, which adds up to 25,216 terms in `dtype`: most of the error."""
    rounding = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    largest = size.max() if size.numel() else 0.0
    assert ((found - expected).abs() <= rounding * (size + 0.1 * largest)).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_dense(reports: list[dict], case: Case):
    for report in (ranks[case.name] for ranks in reports):
        assert_values(*report["logp"])
        assert_values(*report["entropy"])
        assert report["repeatable"]
        assert_gradient(*report["logits"])
        _assert_product(*report["hidden"], case.dtype)
        _assert_product(*report["weight"], case.dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_collective(reports: list[dict], case: Case):
    """The forward pass sends 16 bytes per token with the entropy, 12 without; the backward pass nothing."""
    word = 8 if case.dtype == torch.float64 else 4
    for report in (ranks[case.name] for ranks in reports):
        assert report["sent"] == [("all_gather", words * word * case.rows) for words in (4, 3)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fused_policy_loss(reports: list[dict], case: Case):
    """The same log-probs, one collective of 16 bytes per token, and the gradient of each shard's own columns."""
    word = 8 if case.dtype == torch.float64 else 4
    for report in (ranks[case.name]["fused"] for ranks in reports):
        assert report["same_logp"]
        torch.testing.assert_close(*report["loss"], rtol=1e-5, atol=1e-5)
        assert_gradient(*report["logits"])
        assert report["sent"] == [("all_gather", 4 * word * case.rows)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_linear_token_logprob(reports: list[dict], case: Case):
    """One all-gather for all chunks, and one all-reduce of the gradient of the hidden states."""
    word = 8 if case.dtype == torch.float64 else 4
    for report in (ranks[case.name]["linear"] for ranks in reports):
        assert_values(*report["logp"])
        assert_values(*report["entropy"])
        _assert_product(*report["hidden"], case.dtype)
        _assert_product(*report["weight"], case.dtype)
        assert report["sent"] == [("all_gather", 4 * word * case.rows), ("all_reduce", 16 * word * case.rows)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_support_logprob(reports: list[dict], case: Case):
    """One all-reduce of a word for each token of the support; each shard gets the gradient of its own columns."""
    words = min(7, case.vocab) * case.rows * (8 if case.dtype == torch.float64 else 4)
    for report in (ranks[case.name]["support"] for ranks in reports):
        assert_values(*report["logp"])
        assert_values(*report["entropy"])
        assert_gradient(*report["logits"])
        assert report["sent"] == [("all_reduce", words)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_linear_support_logprob(reports: list[dict], case: Case):
    word = 8 if case.dtype == torch.float64 else 4
    words = min(7, case.vocab) * case.rows * word
    for report in (ranks[case.name]["linear support"] for ranks in reports):
        assert_values(*report["logp"])
        assert_values(*report["entropy"])
        _assert_product(*report["hidden"], case.dtype)
        _assert_product(*report["weight"], case.dtype)
        assert report["sent"] == [("all_reduce", words), ("all_reduce", 16 * word * case.rows)]


def test_every_rank_gets_the_same(reports: list[dict]):
    for case in CASES:
        for ranks in reports[1:]:
            if case.shards == WORLD:
                assert torch.equal(ranks[case.name]["logp"][0], reports[0][case.name]["logp"][0])


@settings(max_examples=60, deadline=None)
@given(shards=st.integers(1, 5), width=st.integers(1, 6), seed=st.integers(0, 10**6), data=st.data())
def test_any_split_of_the_vocabulary_is_the_whole(shards, width, seed, data):
    vocab = data.draw(st.integers(1, shards * width))
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(4, shards * width, generator=generator, dtype=torch.float64)
    logits[torch.rand(logits.shape, generator=generator) < 0.4] = -torch.inf
    targets = torch.randint(vocab, (4,), generator=generator)
    logits[torch.arange(3), targets[:3]] = 0.5  # the last row may have no finite logit at all
    records = []
    for rank in range(shards):
        shard = VocabShard(rank * width, width, min(max(vocab - rank * width, 0), width), vocab, None)
        columns = logits[:, rank * width : (rank + 1) * width]
        records.append(reference.row_records(columns, shard.local(targets), shard.columns, 0.7, with_entropy=True))
    logp, softmax = combine(torch.stack(records), targets, width, 0.7)
    expected = dense(logits[:3], targets[:3], vocab, 0.7, torch.ones(2, 3))
    assert_values(logp[:3], expected.logp)
    assert_values(softmax.entropy[:3], expected.entropy)
    assert not logp[3].isnan()
    assert not softmax.entropy[3].isnan()
