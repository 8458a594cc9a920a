import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.train.megatron import attention
from unirl.train.megatron.attention import group_by_length, plan_attention

tree = st.lists(st.integers(1, 9), min_size=1, max_size=4)  # lengths of the trunk and of each branch


def pack(trees):
    branch_ids, bounds = [], [0]
    for lengths in trees:
        for branch, length in enumerate(lengths):
            branch_ids += [branch] * length
        bounds.append(len(branch_ids))
    return torch.tensor(bounds), torch.tensor(branch_ids)


def visible(bounds, branch_ids):
    """[T, T] bool by the rule in MicroBatch's docstring."""
    tree = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
    same_tree = tree[:, None] == tree[None]
    see = (branch_ids[None] == 0) | (branch_ids[None] == branch_ids[:, None])
    return same_tree & see & torch.ones(len(tree), len(tree), dtype=torch.bool).tril()


def planned_visibility(plan, num_tokens):
    """[T, T] bool: what the calls of a plan let each token see, padded slots included."""
    found = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    token_of_slot = torch.arange(num_tokens) if plan.token_of_slot is None else plan.token_of_slot
    slot_of_token = torch.arange(num_tokens) if plan.slot_of_token is None else plan.slot_of_token
    is_token = torch.zeros(token_of_slot.numel(), dtype=torch.bool)
    is_token[slot_of_token] = True
    first = 0
    for call in plan.calls:
        mask = call.mask
        if mask is None:
            mask = torch.ones(call.length, call.length, dtype=torch.bool).tril().expand(call.batch, 1, -1, -1)
        for row in range(call.batch):
            slots = torch.arange(first, first + call.length)
            first += call.length
            for query in slots[is_token[slots]].tolist():
                seen = slots[mask[row, 0, query - int(slots[0])]]
                assert is_token[seen].all()
                found[token_of_slot[query], token_of_slot[seen]] = True
    assert first == token_of_slot.numel()
    return found


@settings(max_examples=40, deadline=None)
@given(st.lists(tree, min_size=1, max_size=6))
def test_each_token_sees_its_trunk_and_branch_and_nothing_else(trees):
    bounds, branch_ids = pack(trees)
    plan = plan_attention(bounds, branch_ids)
    if plan.slot_of_token is not None:
        assert torch.equal(plan.token_of_slot[plan.slot_of_token], torch.arange(branch_ids.numel()))
    assert torch.equal(planned_visibility(plan, branch_ids.numel()), visible(bounds, branch_ids))


def test_equal_lengths_are_one_call_without_padding():
    bounds, branch_ids = pack([[7]] * 5)
    plan = plan_attention(bounds, branch_ids)
    assert [(call.batch, call.length, call.mask) for call in plan.calls] == [(5, 7, None)]
    assert plan.token_of_slot is None


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.booleans())
def test_groups_hold_every_tree_once_with_bounded_padding(lengths, masked):
    groups = group_by_length(lengths, masked=masked)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        sizes = [lengths[index] for index in group]
        assert len(group) * max(sizes) <= attention.MAX_PADDING * sum(sizes)


@pytest.mark.parametrize(("masked", "expected"), [(False, [[0], [1, 2]]), (True, [[0], [1], [2]])])
def test_large_calls_are_split(masked, expected, monkeypatch):
    monkeypatch.setattr(attention, "MAX_CALL_TOKENS", 200)
    monkeypatch.setattr(attention, "MAX_MASK_ENTRIES", 15_000)
    assert group_by_length([110, 100, 100], masked=masked) == expected
