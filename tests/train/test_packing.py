import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.conftest import make_part
from unirl.train.packing import plan_micro_batches
from unirl.train.plan import first_fit_decreasing


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
    from dataclasses import replace

    part = replace(part, text=replace(part.text, tokens=tokens))
    (batch,) = plan_micro_batches(part, all_samples(part), token_budget=100, share_prompts=True)
    assert batch.tree_cu_seqlens.tolist() == [0, 3, 6]


def test_oversize_sample_is_named(part_of):
    part = part_of([([1], [[2, 3], [4, 5, 6, 7, 8]])])
    with pytest.raises(ValueError, match=r"sample 101 has 6 tokens.*budget of a micro-batch, 5.*stack\.micro_batch"):
        plan_micro_batches(part, all_samples(part), token_budget=5)


def test_not_finite_tokens_are_masked(part_of):
    part = part_of([([1], [[2, 3], [4]])], rewards=[1.0, 0.0])
    part.text.log_probs[2] = float("nan")
    (batch,) = plan_micro_batches(part, all_samples(part), token_budget=50)
    assert batch.loss_mask.tolist() == [True, False, True]


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(40, 90))
def test_bins_hold_everything_once_within_capacity(sizes, capacity):
    bins = first_fit_decreasing(sizes, capacity)
    assert sorted(i for members in bins for i in members) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in members) <= capacity for members in bins)
    assert sum(len(m) == 1 and sizes[m[0]] * 2 <= capacity for m in bins) <= 1  # two half-empty bins would be one
