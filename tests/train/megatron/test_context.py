import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.megatron.conftest import make_batches
from tests.train.megatron.test_attention import pack, visible
from unirl.train.megatron import context
from unirl.train.megatron.context import ContextSplit
from unirl.train.packing import MicroBatch

tree = st.lists(st.integers(1, 9), min_size=1, max_size=3)  # lengths of the trunk and of each branch


def splits_of(trees: list[list[int]], size: int) -> list[ContextSplit]:
    """Of a micro-batch whose trees end with padding; a response token is predicted by every third token."""
    padded = [[*lengths[:-1], lengths[-1] + -sum(lengths) % (2 * size)] for lengths in trees]
    bounds, branch_ids = pack(padded)
    total = branch_ids.numel()
    (some,) = make_batches()
    nothing = {name: value[:0] for name, value in vars(some).items() if isinstance(value, torch.Tensor)}
    predict = torch.arange(0, total, 3)
    given = {
        "tokens": torch.arange(total),
        "branch_ids": branch_ids,
        "tree_cu_seqlens": bounds,
        "predict_positions": predict,
        "targets": predict,
    }
    batch = MicroBatch(**nothing | given)
    return [ContextSplit(batch, size, rank) for rank in range(size)]


@settings(max_examples=30, deadline=None)
@given(st.lists(tree, min_size=1, max_size=5), st.integers(2, 4))
def test_together_the_ranks_let_each_token_see_what_it_should(trees, size):
    splits = splits_of(trees, size)
    batch = splits[0].batch
    gathered = torch.cat([split.tokens for split in splits])
    assert torch.equal(gathered.sort().values, batch.tokens)
    found = torch.zeros(gathered.numel(), gathered.numel(), dtype=torch.bool)
    for split in splits:
        plan = split.plan()
        assert torch.equal(plan.query_index[plan.query_order], torch.arange(split.tokens.numel()))
        queries, keys = split.tokens[plan.query_index], gathered[plan.key_index]
        for call in plan.calls:
            own, queries = queries[: call.batch * call.queries], queries[call.batch * call.queries :]
            seen, keys = keys[: call.batch * call.keys], keys[call.batch * call.keys :]
            mask = call.mask
            if mask is None:  # the last query is the last key
                mask = torch.ones(call.queries, call.keys, dtype=torch.bool).tril(call.keys - call.queries)
            mask = mask.expand(call.batch, 1, -1, -1)[:, 0]
            for row, q, k in zip(mask, own.view(call.batch, -1), seen.view(call.batch, -1), strict=True):
                found[q[:, None], k[None]] |= row
        assert queries.numel() == keys.numel() == 0
    assert torch.equal(found, visible(batch.tree_cu_seqlens, batch.branch_ids))


@settings(max_examples=20, deadline=None)
@given(st.lists(tree, min_size=1, max_size=5), st.integers(2, 4))
def test_each_response_token_has_one_rank_and_all_ranks_have_the_same_work(trees, size):
    splits = splits_of(trees, size)
    batch = splits[0].batch
    assert torch.equal(torch.cat([split.rows for split in splits]).sort().values, torch.arange(batch.targets.numel()))
    work = set()
    for split in splits:
        assert torch.equal(split.tokens[split.predict_positions], batch.predict_positions[split.rows])
        work.add(sum(call.batch * call.queries * call.keys for call in split.plan().calls))
    assert len(work) == 1


def test_calls_are_bounded(monkeypatch):
    monkeypatch.setattr(context, "MAX_CALL_KEYS", 40)
    monkeypatch.setattr(context, "MAX_MASK_ENTRIES", 100)
    plan = splits_of([[16]] * 5 + [[4, 6, 6]] * 3, 2)[0].plan()
    # Chunks of 4 tokens: of the plain trees one in three calls of 4 keys, five with 16; of the others likewise.
    assert [(call.batch, call.keys) for call in plan.calls if call.mask is None] == [(5, 4), (2, 16), (2, 16), (1, 16)]
    assert [(call.batch, call.keys) for call in plan.calls if call.mask is not None] == [(3, 4)] + [(1, 16)] * 3


def test_trees_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match="pad them to multiples of 4"):
        ContextSplit(make_batches()[0], 2, 0).owners  # noqa: B018
