from dataclasses import asdict, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.conftest import make_part, with_support
from unirl.train.packing import join_plans, plan_micro_batches
from unirl.train.plan import CostModel, ParallelShape


def all_samples(part):
    return torch.arange(len(part))


def visible_tokens(batch, query):
    """Tokens that the token at `query` attends to, by the rule in MicroBatch's docstring."""
    bounds = batch.tree_cu_seqlens.tolist()
    start = max(b for b in bounds if b <= query)
    branch = batch.branch_ids.tolist()
    return [k for k in range(start, query + 1) if branch[k] in (0, branch[query])]


def check_against_samples(part, batches):
    """Every response token is predicted from exactly the tokens that precede it in its sample."""
    bounds, seen = part.text.cu_seqlens.tolist(), []
    for batch in batches:
        for row, sample in enumerate(batch.sample_positions.tolist()):
            tokens = part.text.tokens[bounds[sample] : bounds[sample + 1]]
            mask = part.text.loss_mask[bounds[sample] : bounds[sample + 1]]
            places = mask.nonzero().flatten().tolist()
            span = slice(*batch.loss_cu_seqlens[row : row + 2].tolist())
            assert batch.targets[span].tolist() == tokens[mask].tolist()
            for place, predict in zip(places, batch.predict_positions[span].tolist(), strict=True):
                context = visible_tokens(batch, predict)
                assert batch.tokens[context].tolist() == tokens[:place].tolist()
                assert batch.position_ids[context].tolist() == list(range(place))
            seen.append(sample)
    return sorted(seen)


ids = st.integers(0, 50)
group = st.tuples(st.lists(ids, min_size=1, max_size=6), st.lists(st.lists(ids, max_size=5), min_size=1, max_size=4))


@settings(max_examples=60, deadline=None)
@given(st.lists(group, min_size=1, max_size=5), st.integers(11, 60), st.booleans())
def test_every_token_sees_exactly_its_own_past(groups, budget, share):
    part = make_part(groups)
    batches = plan_micro_batches(part, all_samples(part), token_budget=budget, share_prompts=share)
    with_response = (part.text.response_lengths > 0).nonzero().flatten().tolist()
    assert check_against_samples(part, batches) == with_response
    assert all(batch.tokens.numel() <= budget for batch in batches)


shapes = st.builds(ParallelShape, st.integers(1, 5), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 3))


@settings(max_examples=100, deadline=None)
@given(st.lists(group, min_size=1, max_size=5), shapes, st.integers(24, 60), st.booleans())
def test_a_plan_for_several_ranks(groups, shape, budget, share):
    part = make_part(groups)
    options = {"token_budget": budget, "share_prompts": share, "cost": CostModel(1.0, 0.1, 0.2), **asdict(shape)}
    batches = plan_micro_batches(part, all_samples(part), **options)
    with_response = (part.text.response_lengths > 0).nonzero().flatten().tolist()
    assert check_against_samples(part, batches) == with_response, "each sample once, whole"
    assert len(batches) % (shape.dp * shape.count_multiple) == 0
    assert bool(batches) == bool(with_response)
    for batch in batches:
        assert batch.tokens.numel() <= budget
        assert batch.tokens.numel() % shape.total_multiple == 0
        check_consistency(batch, shape.tree_multiple)
    assert_same(batches, plan_micro_batches(part, all_samples(part), **options))


def check_consistency(batch, tree_multiple):
    total, responses = batch.tokens.numel(), batch.targets.numel()
    bounds, lengths = batch.tree_cu_seqlens.tolist(), batch.tree_lengths.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == total == batch.position_ids.numel() == batch.branch_ids.numel()
    assert batch.loss_cu_seqlens[-1] == responses == batch.predict_positions.numel() == batch.advantages.numel()
    assert batch.loss_cu_seqlens.numel() == batch.sample_positions.numel() + 1
    if not batch.sample_positions.numel():
        assert (lengths, responses) == ([1], 0)
    for start, end, length in zip(bounds[:-1], bounds[1:], lengths, strict=True):
        assert (end - start) % tree_multiple == 0
        assert 1 <= length <= end - start
        padding = slice(start + length, end)
        assert not batch.branch_ids[padding].any()
        assert (batch.tokens[padding] == batch.tokens[start]).all()
        assert batch.position_ids[padding].tolist() == [
            batch.position_ids[start + length - 1] + 1 + i for i in range(end - start - length)
        ]
        assert not ((batch.predict_positions >= start + length) & (batch.predict_positions < end)).any()


def assert_same(batches, others):
    for batch, other in zip(batches, others, strict=True):
        for field in fields(batch):
            one, two = getattr(batch, field.name), getattr(other, field.name)
            assert (one is None and two is None) or torch.equal(one, two), field.name


def test_padding_and_an_empty_micro_batch(part_of):
    part = part_of([([1, 2], [[3, 4, 5]])])
    full, empty = plan_micro_batches(part, all_samples(part), token_budget=16, dp=2, tree_multiple=2, total_multiple=8)
    assert full.tokens.tolist() == [1, 2, 3, 4, 5, 1, 1, 1]
    assert full.position_ids.tolist() == list(range(8))
    assert (full.tree_cu_seqlens.tolist(), full.tree_lengths.tolist()) == ([0, 8], [5])
    assert (full.is_empty, empty.is_empty) == (False, True)
    assert (empty.tree_cu_seqlens.tolist(), empty.tree_lengths.tolist()) == ([0, 8], [1])
    assert empty.loss_cu_seqlens.tolist() == [0]
    for field in fields(full):
        one, other = getattr(full, field.name), getattr(empty, field.name)
        assert (one is None and other is None) or one.dtype == other.dtype, field.name


def test_several_plans_run_as_one_rank_after_rank():
    assert join_plans([list("abcd"), list("xy"), []], dp=2) == list("abxcdy")


def test_trees_are_made_smaller_where_that_evens_the_ranks(part_of):
    """Five groups of eight on four ranks: whole, one rank would run two of them."""
    part = part_of([(list(range(40)), [[1] * 20] * 8) for _ in range(5)])

    def dearest_rank(**options):
        plan = plan_micro_batches(part, all_samples(part), token_budget=400, dp=4, cost=CostModel(), **options)
        count = len(plan) // 4
        return max(
            sum(batch.tree_lengths.sum() for batch in plan[r * count : (r + 1) * count] if not batch.is_empty)
            for r in range(4)
        )

    whole, alone = 2 * (40 + 8 * 20), 10 * (40 + 20)
    assert dearest_rank(share_prompts=False) == alone
    assert dearest_rank(share_prompts=True) < min(whole, alone)


def test_sharing_counts_the_prompt_once(part_of):
    part = part_of([([1, 2, 3, 4], [[5], [6, 7], [8]]), ([9], [[1], [2]])])
    (shared,) = plan_micro_batches(part, all_samples(part), token_budget=100, share_prompts=True)
    assert shared.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    assert shared.branch_ids.tolist() == [0, 0, 0, 0, 1, 2, 2, 3, 0, 1, 2]
    assert shared.tree_cu_seqlens.tolist() == [0, 8, 11]
    # the first token of each branch is predicted by the last token of the shared prompt
    assert shared.predict_positions.tolist() == [3, 3, 5, 3, 8, 8]


def test_samples_of_a_group_with_other_prompts_are_not_shared(part_of):
    part = part_of([([1, 2], [[3], [4]])])
    tokens = part.text.tokens.clone()
    tokens[0] = 7
    part = replace(part, text=replace(part.text, tokens=tokens))
    (batch,) = plan_micro_batches(part, all_samples(part), token_budget=100, share_prompts=True)
    assert batch.tree_cu_seqlens.tolist() == [0, 3, 6]


@pytest.mark.parametrize("share", [False, True])
def test_the_support_stands_beside_its_token(part_of, share):
    part = with_support(part_of([([1, 2], [[3, 4, 5], [6]]), ([7], [[8, 9], []])]), vocab=20)
    batches = plan_micro_batches(part, all_samples(part), token_budget=9, share_prompts=share, tree_multiple=2, dp=4)
    assert any(batch.is_empty for batch in batches)
    for batch in batches:
        assert torch.equal(batch.support, part.text.support[batch.token_positions])
        assert (batch.support == batch.targets[:, None]).any(1).all()


def test_oversize_sample_is_named(part_of):
    part = part_of([([1], [[2, 3], [4, 5, 6, 7, 8]])])
    with pytest.raises(ValueError, match=r"sample 101 has 6 tokens.*budget of a micro-batch, 5.*stack\.micro_batch"):
        plan_micro_batches(part, all_samples(part), token_budget=5)


def test_not_finite_tokens_are_masked(part_of):
    part = part_of([([1], [[2, 3], [4]])], rewards=[1.0, 0.0])
    part.text.log_probs[2] = float("nan")
    (batch,) = plan_micro_batches(part, all_samples(part), token_budget=50)
    assert batch.loss_mask.tolist() == [True, False, True]


def test_budget_counts_padding(part_of):
    part = part_of([([1], [[2, 3, 4, 5]])])
    (batch,) = plan_micro_batches(part, all_samples(part), token_budget=11, tree_multiple=8)
    assert batch.tokens.numel() == 8
    with pytest.raises(ValueError, match=r"sample 100 has 5 tokens.*budget.*, 7 \(.*padded to a multiple of 8\)"):
        plan_micro_batches(part, all_samples(part), token_budget=7, tree_multiple=8)


def test_a_response_without_anything_before_it_is_refused(part_of):
    part = part_of([([], [[2, 3]])])
    with pytest.raises(ValueError, match="sample 100 has no token before its response"):
        plan_micro_batches(part, all_samples(part), token_budget=7)
