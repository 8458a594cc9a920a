"""`Part` and `TextSegment`: packing, selection, advantages."""

from dataclasses import replace

import pytest
import torch

from unirl.algorithms import NormConfig
from unirl.types import Part, SampleStatus, TextSegment


def make_text() -> TextSegment:
    """Three samples of 4, 2 and 3 tokens; groups 10, 10, 20; the first tokens are prompts."""
    mask = torch.tensor([False, True, True, True, False, True, False, False, True])
    return TextSegment(
        tokens=torch.arange(9),
        log_probs=torch.where(mask, -torch.arange(9).float(), 0),
        loss_mask=mask,
        turn_ids=torch.where(mask, 0, -1),
        weight_versions=torch.where(mask, 3, -1),
        lengths=torch.tensor([4, 2, 3]),
        sample_ids=torch.tensor([100, 101, 102]),
        group_ids=torch.tensor([10, 10, 20]),
        episode_ids=torch.tensor([100, 101, 102]),
        status=torch.tensor([SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.ABORTED]),
    )


def make_part(rewards: list[float] | None = None) -> Part:
    part = Part(text=make_text(), records=tuple({"prompt": str(i)} for i in range(3)))
    return part if rewards is None else part.with_rewards(torch.tensor(rewards))


def test_lengths_and_sums():
    text = make_text()
    assert text.cu_seqlens.tolist() == [0, 4, 6, 9]
    assert text.response_lengths.tolist() == [3, 1, 1]
    assert text.token_sample_index.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2]
    assert text.sum_by_sample(text.log_probs).tolist() == [-6, -5, -8]


def with_support(text: TextSegment, width: int = 3) -> TextSegment:
    """Each generated token was drawn from itself and its successor."""
    support = torch.full((text.tokens.numel(), width), -1, dtype=torch.int32)
    support[:, 0], support[:, 2] = text.tokens, text.tokens + 1
    return replace(text, support=support.where(text.loss_mask[:, None], -1))


@pytest.mark.parametrize(
    "change",
    [
        {"support": torch.zeros(9, 2)},
        {"support": torch.zeros(8, 2, dtype=torch.int32)},
        {"support": torch.zeros(9, dtype=torch.int32)},
        {"tokens": torch.arange(9).int()},
        {"tokens": torch.arange(8)},
        {"loss_mask": torch.ones(9)},
        {"status": torch.zeros(2, dtype=torch.long)},
        {"lengths": torch.tensor([4, 2, 4])},
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(change):
    with pytest.raises(ValueError, match=r"TextSegment\.\w+: found"):
        replace(make_text(), **change)


def test_groups_are_told_by_ids_wherever_their_samples_stand():
    text = replace(make_text(), group_ids=torch.tensor([20, 10, 20]))
    assert [positions.tolist() for positions in text.group_positions()] == [[1], [0, 2]]
    assert text.select(torch.empty(0, dtype=torch.int64)).group_positions() == []


def test_select_takes_samples_in_the_order_given():
    picked = make_part([1.0, 2.0, 3.0]).compute_advantages().select(torch.tensor([2, 0]))
    assert picked.text.tokens.tolist() == [6, 7, 8, 0, 1, 2, 3]
    assert picked.text.sample_ids.tolist() == [102, 100]
    assert picked.rewards.tolist() == [3, 1]
    assert [record["prompt"] for record in picked.records] == ["2", "0"]
    assert picked.advantages.tolist() == [0, 0, 0, 0, -0.5, -0.5, -0.5]
    assert len(picked.select(torch.tensor([], dtype=torch.long))) == 0


def test_concat_of_what_was_split_is_the_whole():
    text = make_text()
    parts = [text.select(torch.tensor([i])) for i in range(3)]
    joined = TextSegment.concat(parts)
    names = [name for name, value in vars(text).items() if value is not None]
    assert all(torch.equal(getattr(joined, name), getattr(text, name)) for name in names)


def test_the_support_goes_where_its_tokens_go():
    part = replace(make_part(), text=with_support(make_text()))
    picked = part.select(torch.tensor([2, 0]), lengths=torch.tensor([3, 2]))
    assert picked.text.support.tolist() == [[-1] * 3, [-1] * 3, [8, -1, 9], [-1] * 3, [1, -1, 2]]
    kept = torch.arange(9) != 3
    assert part.masked(kept).text.support[3].tolist() == [-1] * 3
    assert torch.equal(part.masked(kept).text.support[kept], part.text.support[kept])


def test_concat_makes_supports_as_wide_as_the_widest():
    text = make_text()
    first, second, third = (text.select(torch.tensor([i])) for i in range(3))
    silent = Part(second, ({},)).masked(torch.zeros(2, dtype=torch.bool)).text  # no generated token, no support
    joined = TextSegment.concat([with_support(first), silent, with_support(third, width=5)])
    assert joined.support.shape == (9, 5)
    assert torch.equal(joined.support[:4, :3], with_support(first).support)
    assert (joined.support[:6, 3:] == -1).all()
    assert (joined.support[4:6] == -1).all()
    assert torch.equal(joined.support[6:], with_support(third, width=5).support)
    assert TextSegment.concat([first, silent]).support is None
    with pytest.raises(ValueError, match="support is there in some segments and not in others"):
        TextSegment.concat([with_support(first), second])


@pytest.mark.parametrize(
    ("arguments", "per_sample"),
    [
        ({}, [-0.5, 0.5, 0.0]),
        ({"normalize": False, "scope": "batch"}, [-1.0, 0.0, 1.0]),
        ({"normalize": True, "scope": "group"}, [-(0.5**0.5), 0.5**0.5, 0.0]),
        ({"normalize": {"mean_level": None, "std_level": None}}, [1.0, 2.0, 3.0]),
        ({"normalize": NormConfig(mean_level="batch", std_level="batch", eps=1e-12)}, [-1.0, 0.0, 1.0]),
        ({"normalize": NormConfig(mean_level="group", std_level=None, mean_leave1out=True)}, [-1.0, 1.0, 0.0]),
    ],
)
def test_advantages_are_spread_over_generated_tokens(arguments, per_sample):
    part = make_part([1.0, 2.0, 3.0]).compute_advantages(**arguments)
    expected = torch.tensor(per_sample)[part.text.token_sample_index] * part.text.loss_mask
    torch.testing.assert_close(part.advantages, expected, rtol=1e-4, atol=1e-5)  # a std has 1e-5 added to it
    assert part.advantages.dtype == torch.float32


def test_a_sample_without_verdict_has_no_advantage_and_no_say():
    part = make_part([1.0, float("nan"), 3.0]).compute_advantages(scope="batch")
    assert part.advantages.tolist() == [0, -1, -1, -1, 0, 0, 0, 0, 1]


def test_advantages_need_rewards_and_a_known_scope():
    with pytest.raises(ValueError, match="grade the samples first"):
        make_part().compute_advantages()
    with pytest.raises(ValueError, match="scope: found 'groups'"):
        make_part([1.0, 2.0, 3.0]).compute_advantages(scope="groups")
    with pytest.raises(ValueError, match=r"rewards: found shape \(2,\)"):
        make_part([1.0, 2.0])
